package tests

import (
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// What a statement does must depend on the user or the account that it is about, not on how many others there are.
// So each is run on a small database and on larger ones, and what it touches is compared: that is the same on every
// machine, busy or not. What time it takes is told, and with LATCHKEY_LONG=1 compared too; that takes five to ten minutes,
// most of them to fill the tables, so give go test a -timeout of 30m.
const (
	smallRows = 10_000
	largeRows = 1_000_000
	shortRows = 100_000    // in their place, with -short
	hugeRows  = 10_000_000 // with LATCHKEY_LONG=1

	// rowsPerOwner is how many requests each user has, and how many entries each account.
	rowsPerOwner = 10

	// deeperBy is by how many levels an index of a larger table may be deeper than that of the small one, which has
	// up to a thousandth of its rows: even an inner page that a split has left half full holds 70 of the longest
	// keys, and 70 times 70 is more than a thousand.
	deeperBy = 2

	// buffersPerRow is how many buffers each more row of the user or the account may add: the page that it is in,
	// as long as no VACUUM has come by since it was written, and its share of a leaf of an index, as above.
	buffersPerRow = 1 + 1.0/70

	// stepsPerRow is how many more rows may go through the nodes of the plan for each more row of the user or the
	// account: it is read, counted, and compared with the slots. A comparison of all pairs takes hundreds.
	stepsPerRow = 10
)

// loads are how many requests of a user are pending, and how many withdrawals of an account are of today. With the
// last, there is room for one more.
var loads = []int{1, 10, 100, 999}

func TestGrowth(t *testing.T) { //nolint:paralleltest // it is, unless it compares times
	long := os.Getenv("LATCHKEY_LONG") == "1"
	sizes := []int{smallRows, largeRows}
	if testing.Short() {
		sizes[1] = shortRows
	}
	if long {
		sizes = append(sizes, hugeRows)
	} else {
		t.Parallel() // in the long form nothing else runs, since times are compared
	}
	all := make([]*grown, len(sizes))
	for i, rows := range sizes {
		all[i] = grow(t, rows)
	}
	small, larger := all[0], all[1:]

	t.Run("of the tables or of what is pending adds as little as it must", func(t *testing.T) {
		requireSameWork(t, small, larger)
	})
	t.Run("of anything else would be seen", func(t *testing.T) {
		requireGrowthIsSeen(t, small, larger[0])
	})
	t.Run("of the keys in one call touches no table", func(t *testing.T) {
		for _, n := range []int{1, 10, 100, 1000} {
			w := small.lock(t, n)
			t.Logf("%4d keys in one call: %.3f ms", n, w.ms)
			require.GreaterOrEqual(t, w.steps, n)
			require.Zero(t, w.buffers)
			w.plan.walk(func(n node) { require.Empty(t, n.Table+n.Index) })
		}
	})
	t.Run("of the tables takes no more time", func(t *testing.T) {
		const rounds, bound = 3, 1.2
		if long {
			testdb.Exec(t, small.url, "CHECKPOINT") // otherwise the calls write what the fill has left in memory
		}
		for _, g := range larger {
			best := math.Inf(1)
			for range rounds {
				best = min(best, timeRatio(t, small, g))
			}
			if g.rows == hugeRows {
				require.LessOrEqual(t, best, bound)
			}
		}
	})
}

// grown is a database with so many requests and entries, and a tenth of that of users, accounts and transfers.
type grown struct {
	rows int
	url  string
	conn *pgx.Conn
	// loaded has for each load the id of a user who has so many pending requests, which is also the id of the first
	// of them, and of the user's account, which has so many withdrawals of today.
	loaded map[int]uuid.UUID
}

// numbered makes the ids of all others. They are in order, so that millions of rows are written in short time into all
// the indexes that are there.
const numbered = `CREATE FUNCTION public.numbered(n bigint) RETURNS uuid LANGUAGE sql IMMUTABLE RETURN lpad(to_hex(n), 32, '0')::uuid`

func numberedID(n int) (id uuid.UUID) {
	binary.BigEndian.PutUint64(id[8:], uint64(n))
	return id
}

// In these, $1 and $2 are the first and the last row, and $3 is how many owners there are. An owner has one row of each
// round, so what belongs to one owner lies all over the table.
const (
	fillRequests = `
		INSERT INTO latchkey.setup_requests (id, user_id, status, pending_slot, max_pending, idempotency_key, created_at, ended_at)
		SELECT public.numbered(n), public.numbered(n % $3), CASE WHEN r < 5 THEN 'completed' ELSE 'pending' END, greatest(r - 4, 1), 1000,
			'k' || r, at, CASE WHEN r < 5 THEN at END
		FROM generate_series($1::bigint, $2) AS n, LATERAL (SELECT n / $3::bigint AS r, timestamptz '2020-01-01' + n * interval '1 s' AS at) AS s`

	fillAccounts = `
		INSERT INTO latchkey.accounts (id, owner_id, balance, daily_limit, idempotency_key)
		SELECT public.numbered(n), public.numbered(n), 1000000, 1000000, 'k1' FROM generate_series(0, $1::bigint - 1) AS n`

	fillTransfers = `
		INSERT INTO latchkey.transfers (id, from_account_id, to_account_id, amount)
		SELECT public.numbered(n), public.numbered(n), public.numbered((n + 1) % $1), 1 FROM generate_series(0, $1::bigint - 1) AS n`

	fillEntries = `
		INSERT INTO latchkey.entries (id, account_id, kind, amount, balance_after, transfer_id, idempotency_key, created_at)
		SELECT public.numbered(n), public.numbered(n % $3),
			CASE WHEN r < 4 THEN 'deposit' WHEN r < 8 THEN 'withdrawal' WHEN r < 9 THEN 'transfer_out' ELSE 'transfer_in' END, 1, 1,
			CASE r WHEN 8 THEN public.numbered(n % $3) WHEN 9 THEN public.numbered((n - 1) % $3) END,
			CASE WHEN r < 9 THEN 'k' || r END, timestamptz '2020-01-01' + n * interval '1 s'
		FROM generate_series($1::bigint, $2) AS n, LATERAL (SELECT n / $3::bigint AS r) AS s`
)

// In these, $1 is the owner, and $2 the load. The rows lie in another order than in the indexes, so that each is in
// another page than the one before.
const (
	loadRequests = `
		INSERT INTO latchkey.setup_requests (id, user_id, pending_slot, max_pending, idempotency_key)
		SELECT CASE n WHEN 1 THEN $1::uuid ELSE gen_random_uuid() END, $1, n, 1000, 'k' || n FROM generate_series(1, $2::bigint) AS n ORDER BY md5(n::text)`

	loadAccount = `
		INSERT INTO latchkey.accounts (id, owner_id, balance, daily_limit, idempotency_key) VALUES ($1, $1, 1000000, 1000000, 'k1')`

	loadEntries = `
		INSERT INTO latchkey.entries (account_id, kind, amount, balance_after, idempotency_key, created_at)
		SELECT $1, 'withdrawal', 1, 1, 'k' || n, now() - n * interval '1 ms' FROM generate_series(1, $2::bigint) AS n ORDER BY md5(n::text)`
)

// filledTables are those that grow fills.
var filledTables = []string{"accounts", "entries", "setup_requests", "transfers"}

func grow(t *testing.T, rows int) *grown {
	t.Helper()
	g := &grown{rows: rows, url: testdb.URL(t), loaded: map[int]uuid.UUID{}}
	g.conn = testdb.Conn(t, g.url)
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := g.conn.Exec(t.Context(), sql, args...)
		require.NoError(t, err, sql)
	}
	for _, table := range filledTables {
		exec("ALTER TABLE latchkey." + table + " SET (autovacuum_enabled = false)") // it would come at any time
	}
	exec(numbered)
	began, owners := time.Now(), rows/rowsPerOwner
	exec(fillAccounts, owners)
	exec(fillTransfers, owners)
	const atOnce = 1_000_000
	for first := 0; first < rows; first += atOnce {
		end := min(first+atOnce, rows)
		exec(fillRequests, first, end-1, owners)
		exec(fillEntries, first, end-1, owners)
		t.Logf("filled %d of %d rows in %v", end, rows, time.Since(began).Round(time.Millisecond))
	}
	exec("VACUUM (ANALYZE) latchkey." + strings.Join(filledTables, ", latchkey."))
	for _, n := range loads { // after VACUUM, so that these rows cost what rows cost that are new
		id := uuid.New()
		exec(loadRequests, id, n)
		exec(loadAccount, id)
		exec(loadEntries, id, n)
		g.loaded[n] = id
	}
	return g
}

// growing are the statements that read or write a filled table, each with every kind of its parameters.
var growing = func() (all []growthCase) {
	ctx, newID := context.Background(), func() pgtype.UUID { return pg(uuid.Must(uuid.NewV7())) } // as the repository makes them
	add := func(statement, variant string, call func(q *db.Queries, id pgtype.UUID) error) {
		all = append(all, growthCase{statement, variant, call})
	}
	add("AccountGet", "", func(q *db.Queries, id pgtype.UUID) error { return errorOf(q.AccountGet(ctx, id)) })
	add("SetupGet", "", func(q *db.Queries, id pgtype.UUID) error { return errorOf(q.SetupGet(ctx, id)) })
	add("SetupCountPending", "", func(q *db.Queries, id pgtype.UUID) error { return errorOf(q.SetupCountPending(ctx, id)) })
	add("SetupEnd", "", func(q *db.Queries, id pgtype.UUID) error {
		return errorOf(q.SetupEnd(ctx, db.SetupEndParams{ID: id, Status: string(repository.SetupCompleted)}))
	})
	late, page := time.Now().AddDate(1, 0, 0), int32(100)
	add("SetupListByUser", "", func(q *db.Queries, id pgtype.UUID) error {
		return errorOf(q.SetupListByUser(ctx, db.SetupListByUserParams{UserID: id, BeforeCreatedAt: late, BeforeID: pg(uuid.Max), MaxRows: page}))
	})
	add("EntryListByAccount", "", func(q *db.Queries, id pgtype.UUID) error {
		return errorOf(q.EntryListByAccount(ctx, db.EntryListByAccountParams{AccountID: id, BeforeCreatedAt: late, BeforeID: pg(uuid.Max), MaxRows: page}))
	})
	add("SetupInsertWithinLimit", "", func(q *db.Queries, id pgtype.UUID) error {
		return errorOf(q.SetupInsertWithinLimit(ctx, db.SetupInsertWithinLimitParams{UserID: id, ID: newID(), MaxPending: 1000}))
	})
	add("SetupInsertManyWithinLimit", "", func(q *db.Queries, id pgtype.UUID) error {
		return errorOf(q.SetupInsertManyWithinLimit(ctx, db.SetupInsertManyWithinLimitParams{UserID: id, Ids: []pgtype.UUID{newID(), newID()}, MaxPending: 1000}))
	})
	fresh, used := "fresh", "k1"
	for variant, key := range map[string]*string{"no key": nil, "new key": &fresh, "used key": &used} {
		if key != nil {
			add("SetupInsertOnce", variant, func(q *db.Queries, id pgtype.UUID) error {
				return errorOf(q.SetupInsertOnce(ctx, db.SetupInsertOnceParams{UserID: id, IdempotencyKey: *key, ID: newID(), MaxPending: 1000}))
			})
		}
		add("AccountInsert", variant, func(q *db.Queries, id pgtype.UUID) error {
			return errorOf(q.AccountInsert(ctx, db.AccountInsertParams{OwnerID: id, IdempotencyKey: key, ID: newID(), TimeZone: "UTC"}))
		})
		add("EntryInsertDeposit", variant, func(q *db.Queries, id pgtype.UUID) error {
			return errorOf(q.EntryInsertDeposit(ctx, db.EntryInsertDepositParams{AccountID: id, IdempotencyKey: key, Amount: 1, ID: newID()}))
		})
		add("EntryInsertWithdrawal", variant, func(q *db.Queries, id pgtype.UUID) error {
			return errorOf(q.EntryInsertWithdrawal(ctx, db.EntryInsertWithdrawalParams{AccountID: id, IdempotencyKey: key, Amount: 1, ID: newID()}))
		})
		add("TransferInsert", variant, func(q *db.Queries, id pgtype.UUID) error {
			return errorOf(q.TransferInsert(ctx, db.TransferInsertParams{
				FromAccountID: id, ToAccountID: pg(numberedID(1)), IdempotencyKey: key, Amount: 1, ID: newID(), FromEntryID: newID(), ToEntryID: newID(),
			}))
		})
	}
	slices.SortFunc(all, func(a, b growthCase) int { return cmp.Compare(a.String(), b.String()) })
	return all
}()

type growthCase struct {
	statement, variant string
	call               func(q *db.Queries, id pgtype.UUID) error
}

func (c growthCase) String() string { return strings.TrimSuffix(c.statement+", "+c.variant, ", ") }

var (
	planModes = []string{"force_custom_plan", "force_generic_plan"}

	indexLine  = regexp.MustCompile(`\bIndex(?:es)?: ([^.]+)\.`)
	wrappedDoc = regexp.MustCompile(`\n-- ?`)
)

// namedIndexes returns, for each statement that is about a filled table, the indexes that its comment names.
func namedIndexes(t *testing.T) map[string][]string {
	t.Helper()
	named := map[string][]string{}
	for _, q := range sourceQueries(t) {
		if !slices.ContainsFunc(filledTables, func(table string) bool { return strings.Contains(sqlCode(q.sql, false), "latchkey."+table) }) {
			continue
		}
		match := indexLine.FindStringSubmatch(wrappedDoc.ReplaceAllString(q.sql, " "))
		require.NotNil(t, match, "%s: its comment names no index", q.name)
		named[q.name] = strings.Split(match[1], ", ")
	}
	return named
}

func requireSameWork(t *testing.T, small *grown, larger []*grown) {
	t.Helper()
	named, used := namedIndexes(t), map[string]map[string]bool{}
	t.Logf("buffers and time of each statement, in tables of %d rows and of more", small.rows)
	for _, c := range growing {
		if used[c.statement] == nil {
			used[c.statement] = map[string]bool{}
		}
		for _, mode := range planModes {
			told := fmt.Sprintf("%s, %s:", c, mode)
			least := map[*grown]work{} // of the smallest load
			for _, n := range loads {
				told += fmt.Sprintf(" load %d", n)
				var inSmall work
				for _, g := range append([]*grown{small}, larger...) {
					w := g.measure(t, mode, statementOf(t, func(q *db.Queries) error { return c.call(q, pg(g.loaded[n])) }))
					told += fmt.Sprintf(" | %d, %.3f ms", w.buffers, w.ms)
					what := fmt.Sprintf("%s, %s, load %d, %d rows", c, mode, n, g.rows)
					require.NoError(t, w.checkPlan(named[c.statement]), what)
					for _, index := range w.indexes() {
						used[c.statement][index] = true
					}
					if n == loads[0] {
						least[g] = w
					} else {
						require.NoError(t, w.checkLoad(least[g], n-loads[0]), what)
					}
					if g == small {
						inSmall = w
					} else {
						require.NoError(t, w.checkSize(inSmall), what)
					}
				}
				told += ";"
			}
			t.Log(told)
		}
	}
	for statement, indexes := range named {
		for _, index := range indexes {
			require.True(t, used[statement][index], "%s: no plan of it uses %s, which its comment names", statement, index)
		}
	}
}

// requireGrowthIsSeen is the negative control: each check fails where it must.
func requireGrowthIsSeen(t *testing.T, small, large *grown) {
	t.Helper()
	measure := func(g *grown, load int, sql string) work {
		return g.measure(t, planModes[1], statement{sql, []any{g.loaded[load]}})
	}
	const scan = "SELECT count(*) FROM latchkey.setup_requests AS s WHERE s.user_id::text = $1::text"
	require.ErrorContains(t, measure(small, 1, scan).checkPlan(nil), "whole table")
	require.ErrorContains(t, measure(large, 1, scan).checkSize(measure(small, 1, scan)), "in a small table")

	const byKey = "SELECT a.id FROM latchkey.accounts AS a WHERE a.id = $1"
	require.NoError(t, measure(small, 1, byKey).checkPlan([]string{"accounts_pkey"}))
	require.ErrorContains(t, measure(small, 1, byKey).checkPlan([]string{"accounts_idempotency_key"}), "does not name")

	const countForEach = `
		SELECT count((SELECT count(*) FROM latchkey.setup_requests AS b WHERE b.user_id = a.user_id AND b.status = 'pending'))
		FROM latchkey.setup_requests AS a
		WHERE a.user_id = $1 AND a.status = 'pending'`
	const compareAll = `
		WITH pending AS MATERIALIZED (
			SELECT s.pending_slot FROM latchkey.setup_requests AS s WHERE s.user_id = $1 AND s.status = 'pending'
		)
		SELECT count(*) FROM pending AS a JOIN pending AS b ON a.pending_slot < b.pending_slot`
	require.ErrorContains(t, measure(small, 100, countForEach).checkLoad(measure(small, 1, countForEach), 99), "buffers")
	require.ErrorContains(t, measure(small, 100, compareAll).checkLoad(measure(small, 1, compareAll), 99), "steps")
}

// statement is what a call of the generated package would send.
type statement struct {
	sql  string
	args []any
}

var errRecorded = errors.New("recorded, not sent")

func (s *statement) Exec(_ context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	s.sql, s.args = sql, args
	return pgconn.CommandTag{}, errRecorded
}

func (s *statement) Query(_ context.Context, sql string, args ...any) (pgx.Rows, error) {
	s.sql, s.args = sql, args
	return nil, errRecorded
}

func (s *statement) QueryRow(_ context.Context, sql string, args ...any) pgx.Row {
	s.sql, s.args = sql, args
	return recordedRow{}
}

type recordedRow struct{}

func (recordedRow) Scan(...any) error { return errRecorded }

func statementOf(t *testing.T, call func(q *db.Queries) error) (s statement) {
	t.Helper()
	require.ErrorIs(t, call(db.New(&s)), errRecorded)
	return s
}

// execute returns SQL that executes the statement, prepared as growing, with its arguments, which can only be literals
// there.
func (s statement) execute(t *testing.T, tx pgx.Tx) string {
	t.Helper()
	d, err := tx.Conn().Prepare(t.Context(), "", s.sql)
	require.NoError(t, err)
	literals := make([]string, len(s.args))
	for i, arg := range s.args {
		text, err := tx.Conn().TypeMap().Encode(d.ParamOIDs[i], pgtype.TextFormatCode, arg, nil)
		require.NoError(t, err)
		literals[i] = "NULL"
		if text != nil {
			literals[i] = "'" + strings.ReplaceAll(string(text), "'", "''") + "'"
		}
	}
	return "EXECUTE growing (" + strings.Join(literals, ", ") + ")"
}

// work is what a statement did.
type work struct {
	plan     node
	ms       float64
	buffers  int // pages of 8 KiB that were found in the server's memory or read into it
	steps    int // rows that went through the nodes of the plan, also those that a filter dropped
	descents int // from the root of an index to a leaf, at most
	fetched  int // rows that came out of indexes
	scans    int // of whole tables: those in the plan, and those that the checks of foreign keys make
}

// node is a node of a plan as EXPLAIN tells it; from PostgreSQL 18 on, rows are averages with decimals.
type node struct {
	Type     string  `json:"Node Type"`
	Parent   string  `json:"Parent Relationship"`
	Table    string  `json:"Relation Name"`
	Index    string  `json:"Index Name"`
	Rows     float64 `json:"Actual Rows"`
	Loops    float64 `json:"Actual Loops"`
	Filtered float64 `json:"Rows Removed by Filter"`
	Unjoined float64 `json:"Rows Removed by Join Filter"`
	Hit      int     `json:"Shared Hit Blocks"`
	Read     int     `json:"Shared Read Blocks"`
	Plans    []node  `json:"Plans"`
}

func (n node) walk(visit func(node)) {
	visit(n)
	for _, child := range n.Plans {
		child.walk(visit)
	}
}

// measure runs the statement a few times, on a connection that has run it before, as those in a pool have, and takes
// the least: more is chance, such as a page that was full, and that is split or left for another one.
func (g *grown) measure(t *testing.T, mode string, s statement) work {
	t.Helper()
	g.run(t, mode, s)
	least := g.run(t, mode, s)
	for range 3 {
		w := g.run(t, mode, s)
		ms := min(w.ms, least.ms)
		if w.buffers < least.buffers {
			least = w
		}
		least.ms = ms
	}
	return least
}

const tableScans = "SELECT coalesce(sum(s.seq_scan), 0)::bigint FROM pg_catalog.pg_stat_xact_user_tables AS s WHERE s.schemaname = 'latchkey'"

// run runs the statement in a transaction that is undone, with the locks and settings that are there before it.
func (g *grown) run(t *testing.T, mode string, s statement, before ...statement) (w work) {
	t.Helper()
	tx := begin(t, g.conn, pgx.TxOptions{})
	exec := func(sql string, args ...any) {
		t.Helper()
		_, err := tx.Exec(t.Context(), sql, args...)
		require.NoError(t, err, sql)
	}
	exec("SET LOCAL plan_cache_mode = " + mode)
	for _, b := range before {
		exec(b.sql, b.args...)
	}
	exec("PREPARE growing AS " + s.sql)
	var scansBefore int
	require.NoError(t, tx.QueryRow(t.Context(), tableScans).Scan(&scansBefore))
	var text []byte
	require.NoError(t, tx.QueryRow(t.Context(), "EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) "+s.execute(t, tx)).Scan(&text))
	require.NoError(t, tx.QueryRow(t.Context(), tableScans).Scan(&w.scans))
	w.scans -= scansBefore // counted by the server, since what a foreign key checks is not in the plan
	exec("DEALLOCATE growing")
	require.NoError(t, tx.Rollback(t.Context()))

	var explained []struct {
		Plan node    `json:"Plan"`
		Time float64 `json:"Execution Time"`
	}
	require.NoError(t, json.Unmarshal(text, &explained), string(text))
	w.plan, w.ms = explained[0].Plan, explained[0].Time
	w.buffers = w.plan.Hit + w.plan.Read
	var steps, descents, fetched float64
	w.plan.walk(func(n node) {
		steps += (n.Rows + n.Filtered + n.Unjoined) * n.Loops
		switch {
		case strings.HasSuffix(n.Type, "Seq Scan"):
			w.scans++ // of a parallel one, the server counts those of this process only
		case n.Index != "":
			descents += n.Loops
			fetched += n.Rows * n.Loops
		case n.Type == "ModifyTable":
			rows := n.Plans[slices.IndexFunc(n.Plans, func(n node) bool { return n.Parent == "Outer" })]
			descents += rows.Rows * rows.Loops * mostIndexes
		}
	})
	w.steps, w.descents, w.fetched = int(steps), int(descents), int(fetched)
	return w
}

// mostIndexes is how many indexes a table has at most, each of which gets an entry for a new row.
const mostIndexes = 5

func (w work) indexes() (names []string) {
	w.plan.walk(func(n node) {
		if n.Index != "" {
			names = append(names, n.Index)
		}
	})
	return names
}

func (w work) checkPlan(named []string) error {
	if w.scans > 0 {
		return errors.New("it reads a whole table")
	}
	for _, index := range w.indexes() {
		if !slices.Contains(named, index) {
			return fmt.Errorf("it uses %s, which its comment does not name", index)
		}
	}
	return nil
}

// checkSize compares the same work in a small table. That the rows which it is about lie in fewer pages there is chance,
// and that their entries in an index lie in one leaf.
func (w work) checkSize(small work) error {
	if most := small.buffers + (deeperBy+1)*w.descents + w.fetched; w.buffers > most {
		return fmt.Errorf("it touches %d buffers, in a small table %d, so at most %d were due", w.buffers, small.buffers, most)
	}
	return nil
}

// checkLoad compares the same work with fewer rows of the user or the account.
func (w work) checkLoad(less work, moreRows int) error {
	if most := less.buffers + int(math.Ceil(buffersPerRow*float64(moreRows))); w.buffers > most {
		return fmt.Errorf("it touches %d buffers, with %d rows less %d, so at most %d were due", w.buffers, moreRows, less.buffers, most)
	}
	if most := less.steps + stepsPerRow*moreRows; w.steps > most {
		return fmt.Errorf("it takes %d steps, with %d rows less %d, so at most %d were due", w.steps, moreRows, less.steps, most)
	}
	return nil
}

// lock takes n locks in one call.
func (g *grown) lock(t *testing.T, n int) work {
	t.Helper()
	keys := make([]int64, n)
	for i := range keys {
		keys[i] = rand.Int64()
	}
	budget := statementOf(t, func(q *db.Queries) error { return q.TxSetLockBudget(t.Context(), lockBudget(patience)) })
	all := statementOf(t, func(q *db.Queries) error { return q.LockAll(t.Context(), exclusive(keys...).params()) })
	g.run(t, planModes[1], all, budget)
	return g.run(t, planModes[1], all, budget)
}

// timeRatio returns how much longer a guarded insert takes in the larger database, by the medians of calls that take
// turns, each for another user.
func timeRatio(t *testing.T, small, larger *grown) float64 {
	t.Helper()
	const calls = 1000
	both := []*grown{small, larger}
	repos := make([]*repository.Repository, len(both))
	for i, g := range both {
		var err error
		repos[i], err = repository.New(testdb.PoolAt(t, g.url, maxConns(1)))
		require.NoError(t, err)
	}
	times := make([][]float64, len(both))
	for n := range calls {
		for i := range both {
			i = (i + n) % len(both) // each is the first as often as the other
			user := numberedID(1 + rand.IntN(both[i].rows/rowsPerOwner-1))
			began := time.Now()
			_, err := repos[i].CreateSetup(t.Context(), user, &repository.CreateSetupOpts{MaxPending: 1000})
			took := time.Since(began)
			require.NoError(t, err)
			if n >= calls/2 { // before that, the connections and the server's memory get warm
				times[i] = append(times[i], took.Seconds()*1000)
			}
		}
	}
	a, b := medianOf(times[0]), medianOf(times[1])
	t.Logf("CreateSetup: median %.3f ms of %d rows, %.3f ms of %d rows, ratio %.2f", a, small.rows, b, larger.rows, b/a)
	return b / a
}

func medianOf(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}
