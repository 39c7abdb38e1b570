package repository

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latchkey-go/latchkey/db"
)

// Severity says what becomes of a finding that stays as it is.
type Severity string

// From the worst.
const (
	SeverityUnsafe  Severity = "unsafe"  // a rule may be broken, or what was acknowledged may be lost
	SeverityFailing Severity = "failing" // calls fail, or will
	SeverityNotice  Severity = "notice"  // calls work, but not as the documentation says: slower, or ended early
)

var severities = []Severity{SeverityUnsafe, SeverityFailing, SeverityNotice}

// Finding is something about the server, the schema or the role that is not as it should be.
type Finding struct {
	Name     string // what it is about, such as "fsync" or "index setup_requests_pending_key"; for a program to know it by
	Severity Severity
	Problem  string // what was found, and what comes of it
	Advice   string // what to do
}

func (f Finding) String() string {
	return fmt.Sprintf("%s: %s: %s; %s", f.Severity, f.Name, f.Problem, f.Advice)
}

// maxFindings bounds each list that Check reads; the schema holds a tenth of it.
const maxFindings = 1000

// Check looks whether this server, its schema latchkey and this role are set up safely, and returns what is not, the
// worst first; nothing means that nothing was found. It is for a host's start, its readiness or a person: some ten round
// trips, and two connections beside the pool for a moment. It changes nothing.
//
// It first proves that the server excludes by advisory locks, as the first call that takes a lock does where there was
// no Check: if not, that is [ErrUnsafeServer]. Other errors mean that the server could not be asked, [ErrLockBusy] among
// them: the two connections, or one of the pool, were not to be had in time.
//
// Settings are those of a session of the pool, which the role, the database or the client may have set.
func (r *Repository) Check(ctx context.Context) (_ []Finding, err error) {
	defer r.done(ctx, "Check", time.Now(), &err)
	c := &call{timeout: r.lockTimeout}
	if err := r.requireExclusion(ctx, c); err != nil {
		return nil, err
	}
	c.started = time.Now()
	conn, err := r.acquire(ctx, c)
	if err != nil {
		return nil, err
	}
	defer conn.Release()

	check := checker{q: r.alone(conn), pid: conn.Conn().PgConn().PID(), hold: r.holdTimeout}
	for _, step := range []func(context.Context) error{check.server, check.pooler, check.schema} {
		if err := step(ctx); err != nil {
			return nil, c.classify(ctx, err, conn.Conn().IsClosed)
		}
	}
	slices.SortStableFunc(check.findings, func(a, b Finding) int {
		return slices.Index(severities, a.Severity) - slices.Index(severities, b.Severity)
	})
	return check.findings, nil
}

type checker struct {
	q        *db.Queries
	pid      uint32 // of the server process, as the connection was told
	hold     time.Duration
	findings []Finding
}

func (c *checker) add(severity Severity, name, problem, advice string) {
	c.findings = append(c.findings, Finding{Name: name, Severity: severity, Problem: problem, Advice: advice})
}

// minVersion is the oldest server that the statements run on, as server_version_num has it.
const minVersion = 150000

// server looks at the settings.
func (c *checker) server(ctx context.Context) error {
	rows, err := c.q.CheckSettings(ctx, db.CheckSettingsParams{Names: []string{
		"default_transaction_isolation", "default_transaction_read_only", "fsync", "full_page_writes",
		"idle_in_transaction_session_timeout", "in_hot_standby", "max_connections", "max_locks_per_transaction",
		"max_prepared_transactions", "server_encoding", "server_version_num", "session_replication_role",
		"statement_timeout", "synchronous_commit", "transaction_timeout",
	}, MaxRows: maxFindings})
	if err != nil {
		return err
	}
	s := make(settings, len(rows))
	for _, row := range rows {
		s[row.Name] = row.Setting
	}
	c.judge(s)
	return nil
}

// settings are those of a session, each in its own unit. One that the server does not know is empty.
type settings map[string]string

func (s settings) number(name string) int {
	n, _ := strconv.Atoi(s[name])
	return n
}

// judge says what is wrong with the settings.
func (c *checker) judge(s settings) {
	if s.number("server_version_num") < minVersion {
		c.add(SeverityFailing, "server_version_num", "the server is "+s["server_version_num"]+", older than PostgreSQL 15",
			"upgrade it: the statements are written for 15 and newer, and tested on no other")
	}
	if s["in_hot_standby"] == "on" {
		c.add(SeverityFailing, "in_hot_standby", "the server is a standby: it takes no writes, and its locks are not those of the primary",
			"connect to the primary, such as with target_session_attrs=read-write")
	}
	if s["default_transaction_read_only"] == "on" {
		c.add(SeverityFailing, "default_transaction_read_only", "transactions are read-only by default, so writes fail with 25006",
			"set it to off for the role of the service")
	}
	for _, name := range []string{"fsync", "full_page_writes"} {
		if s[name] == "off" {
			c.add(SeverityUnsafe, name, name+" is off: a crash of the machine can damage or lose all data", "set it to on")
		}
	}
	if s["synchronous_commit"] == "off" {
		c.add(SeverityUnsafe, "synchronous_commit", "it is off: the last calls that returned without an error can be lost in a crash",
			"set it to on, or accept the loss")
	}
	if s["session_replication_role"] == "replica" {
		c.add(SeverityUnsafe, "session_replication_role", "it is replica: foreign keys are not enforced in this session", "set it to origin")
	}
	if encoding := s["server_encoding"]; encoding != "UTF8" {
		c.add(SeverityFailing, "server_encoding", "the database's encoding is "+encoding+
			": text that it does not have is refused, and SQL_ASCII checks none", "make the database with ENCODING 'UTF8'")
	}
	room := s.number("max_locks_per_transaction") * (s.number("max_connections") + s.number("max_prepared_transactions"))
	if room < 4*MaxLocks {
		c.add(SeverityFailing, "max_locks_per_transaction", fmt.Sprintf(
			"the lock table has room for about %d locks, all sessions' together; one call may take %d", room, MaxLocks),
			"raise max_locks_per_transaction, or take few locks in a call")
	}
	if isolation := s["default_transaction_isolation"]; isolation != "read committed" {
		c.add(SeverityNotice, "default_transaction_isolation", "it is "+isolation+
			": a call needs BEGIN and COMMIT of its own, and methods that join a transaction refuse one of that level",
			"leave it at read committed for the role of the service")
	}
	if s.number("statement_timeout") > 0 {
		c.add(SeverityNotice, "statement_timeout", "it is "+s["statement_timeout"]+
			" ms: a call needs BEGIN and COMMIT of its own, and its statement may be ended early",
			"set it to 0 for the role of the service; the lock timeout and the context bound a call")
	}
	if s.number("transaction_timeout") > 0 {
		c.add(SeverityNotice, "transaction_timeout", "it is "+s["transaction_timeout"]+
			" ms: a call needs BEGIN and COMMIT of its own, and a transaction to join may end with its connection",
			"set it to 0 for the role of the service")
	}
	idle := time.Duration(s.number("idle_in_transaction_session_timeout")) * time.Millisecond
	if idle > 0 && idle < c.hold {
		c.add(SeverityNotice, "idle_in_transaction_session_timeout", fmt.Sprintf(
			"it is %v, shorter than the hold timeout of %v: a guarded function that pauses for longer loses its connection", idle, c.hold),
			"raise it, or shorten the hold timeout")
	}
}

// pooler compares the number of the server process with that which the connection was told when it was made.
func (c *checker) pooler(ctx context.Context) error {
	pid, err := c.q.CheckBackend(ctx)
	if err == nil && uint32(pid) != c.pid {
		c.add(SeverityNotice, "pooler", "the server process is not that of the connection: a pooler stands between",
			"have it pool transactions, not statements, use an exec mode that it can serve, such as pgx.QueryExecModeExec, and migrate on a direct connection")
	}
	return err
}

// schemaVersion is that of the latest migration. The statements need what is in it.
const schemaVersion = 6

// schema looks at the version of the schema, at what must be in it, and at what the role may do with that.
func (c *checker) schema(ctx context.Context) error {
	tables, err := c.q.CheckTables(ctx, maxFindings)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(tables, func(t db.CheckTablesRow) bool { return t.Name == "schema_migrations" }) {
		c.add(SeverityFailing, "schema", "there is no schema latchkey, or it is not latchkey's", "call migrations.Up")
		return nil
	}
	if !tables[0].MayUseSchema {
		c.add(SeverityFailing, "schema", "the role may not use the schema latchkey", "GRANT USAGE ON SCHEMA latchkey")
	} else if err := c.version(ctx); err != nil {
		return err
	}
	c.tables(tables)
	for _, look := range []func(context.Context) error{c.functions, c.objects, c.triggers} {
		if err := look(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (c *checker) version(ctx context.Context) error {
	row, err := c.q.CheckVersion(ctx)
	var pgErr *pgconn.PgError
	switch {
	case errors.As(err, &pgErr) && pgErr.Code == insufficientPrivilege:
		return nil // its grant is among the findings
	case err != nil && !errors.Is(err, pgx.ErrNoRows):
		return err
	case row.Dirty:
		c.add(SeverityFailing, "schema version", fmt.Sprintf("migration %d was left half done", row.Version),
			"look what is missing, complete it by hand, and set dirty to false in latchkey.schema_migrations")
	case row.Version < schemaVersion:
		c.add(SeverityFailing, "schema version", fmt.Sprintf("it is %d, and this build needs %d", row.Version, schemaVersion),
			"call migrations.Up")
	case row.Version > schemaVersion:
		c.add(SeverityNotice, "schema version", fmt.Sprintf("it is %d, of a newer build than this one, which knows %d", row.Version, schemaVersion),
			"deploy the newer build everywhere")
	}
	return nil
}

// grants are what the role needs, as README says, by table. Two are for a method that a service may do without.
var grants = []struct {
	table      string
	privileges []string
	severity   Severity
}{
	{"accounts", []string{"SELECT", "INSERT", "UPDATE"}, SeverityFailing},
	{"entries", []string{"SELECT", "INSERT"}, SeverityFailing},
	{"leases", []string{"SELECT", "INSERT", "UPDATE"}, SeverityFailing},
	{"lock_activity", []string{"SELECT"}, SeverityNotice},
	{"outbox", []string{"SELECT", "INSERT", "UPDATE", "DELETE"}, SeverityFailing},
	{"schema_migrations", []string{"SELECT"}, SeverityNotice},
	{"setup_requests", []string{"SELECT", "INSERT", "UPDATE"}, SeverityFailing},
	{"transfers", []string{"SELECT", "INSERT"}, SeverityFailing},
}

func (c *checker) tables(found []db.CheckTablesRow) {
	for _, grant := range grants {
		i := slices.IndexFunc(found, func(t db.CheckTablesRow) bool { return t.Name == grant.table })
		if i < 0 {
			c.missing("table", grant.table, SeverityFailing)
			continue
		}
		t := found[i]
		may := map[string]bool{"SELECT": t.MaySelect, "INSERT": t.MayInsert, "UPDATE": t.MayUpdate, "DELETE": t.MayDelete}
		lacking := slices.DeleteFunc(slices.Clone(grant.privileges), func(p string) bool { return may[p] })
		if len(lacking) > 0 {
			list := strings.Join(lacking, ", ")
			c.add(grant.severity, "privileges on "+t.Name, "the role lacks "+list, fmt.Sprintf("GRANT %s ON latchkey.%s", list, t.Name))
		}
		if t.HidesRows {
			c.add(SeverityUnsafe, "row security on "+t.Name, "row security is on for this role: what is counted or summed may be a part",
				"turn it off for the table, or give the role BYPASSRLS")
		}
	}
}

// functions looks at those that the statements call.
func (c *checker) functions(ctx context.Context) error {
	found, err := c.q.CheckFunctions(ctx, maxFindings)
	if err != nil {
		return err
	}
	for _, name := range []string{"outbox_insert", "outbox_is_possible", "raise_error", "setup_free_slot"} {
		i := slices.IndexFunc(found, func(f db.CheckFunctionsRow) bool { return f.Name == name })
		switch {
		case i < 0:
			c.missing("function", name, SeverityFailing)
		case !found[i].MayExecute:
			c.add(SeverityFailing, "privileges on "+name, "the role lacks EXECUTE",
				"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA latchkey")
		}
	}
	return nil
}

// The indexes and constraints of the schema. Without one that holds a rule, a writer that skips the lock breaks it.
var (
	holding = []string{
		"accounts_balance_check", "accounts_daily_limit_check", "accounts_idempotency_key", "accounts_idempotency_key_check",
		"accounts_pkey", "accounts_time_zone_check", "entries_account_id_fkey", "entries_amount_check",
		"entries_balance_after_check", "entries_idempotency_key", "entries_idempotency_key_check", "entries_kind_check",
		"entries_pkey", "entries_transfer_id_check", "entries_transfer_id_fkey", "entries_transfer_id_kind_key",
		"leases_expires_at_check", "leases_fence_check", "leases_name_check", "leases_owner_check", "leases_pkey",
		"outbox_pkey", "outbox_state_check", "outbox_turn_key", "schema_migrations_pkey", "setup_requests_ended_at_check",
		"setup_requests_idempotency_key", "setup_requests_idempotency_key_check", "setup_requests_max_pending_check",
		"setup_requests_pending_key", "setup_requests_pending_slot_check", "setup_requests_pkey",
		"setup_requests_status_check", "transfers_amount_check", "transfers_from_account_id_fkey", "transfers_pkey",
		"transfers_to_account_id_check", "transfers_to_account_id_fkey",
	}
	serving = []string{
		"entries_account_id_created_at_idx", "entries_outgoing_idx", "outbox_aggregate_due_idx", "outbox_due_idx",
		"outbox_ended_idx", "setup_requests_user_id_created_at_idx", "transfers_from_account_id_idx",
		"transfers_to_account_id_idx",
	}
)

func (c *checker) objects(ctx context.Context) error {
	found, err := c.q.CheckObjects(ctx, maxFindings)
	if err != nil {
		return err
	}
	for _, kind := range []struct {
		names    []string
		severity Severity
	}{{holding, SeverityUnsafe}, {serving, SeverityNotice}} {
		for _, name := range kind.names {
			i := slices.IndexFunc(found, func(o db.CheckObjectsRow) bool { return o.Name == name })
			switch {
			case i < 0:
				c.missing("index or constraint", name, kind.severity)
			case !found[i].Sound:
				c.add(kind.severity, "index or constraint "+name, "it is there, but not valid, or not unique",
					"make it anew, as the files in migrations have it")
			}
		}
	}
	return nil
}

func (c *checker) triggers(ctx context.Context) error {
	tables, err := c.q.CheckDisabledTriggers(ctx, maxFindings)
	for _, table := range tables {
		c.add(SeverityUnsafe, "triggers of "+table, "those that hold a foreign key are disabled",
			"ALTER TABLE latchkey."+table+" ENABLE TRIGGER ALL, and DISABLE TRIGGER outbox_notify unless that was on")
	}
	return err
}

func (c *checker) missing(kind, name string, severity Severity) {
	c.add(severity, kind+" "+name, "it is missing", "make it anew, as the files in migrations have it")
}
