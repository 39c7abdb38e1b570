package tests

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// What sqlc accepts is not always what was meant. These tests read the statements, what sqlc made of them,
// and the migrations, and each check is shown to fail on a statement that breaks it.

func TestGeneratedQueriesPrepareOnARealServer(t *testing.T) {
	t.Parallel()
	conn, err := testdb.Pool(t).Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()

	for name, sql := range generatedQueries(t) {
		_, err := conn.Conn().PgConn().Prepare(t.Context(), name, sql, nil)
		require.NoError(t, err, name)
	}
	_, err = conn.Conn().PgConn().Prepare(t.Context(), "wrong", "SELECT s.nothing FROM latchkey.setup_requests AS s", nil)
	require.Error(t, err, "a server that prepares anything proves nothing")
}

func TestGeneratedQueriesAreThoseOfTheSources(t *testing.T) {
	t.Parallel()
	var want []string
	for _, q := range sourceQueries(t) {
		want = append(want, q.name)
	}
	require.NotEmpty(t, want)
	require.ElementsMatch(t, want, slices.Collect(maps.Keys(generatedQueries(t))))
}

// Where sqlc cannot tell a type it writes interface{}, and the mistake shows only at run time.
func TestGeneratedTypesAreAllKnown(t *testing.T) {
	t.Parallel()
	for path, source := range readFiles(t, "../db/*.sql.go") {
		require.NotContains(t, source, "interface{}", "%s: cast the parameter or the column", path)
	}
}

func TestGeneratedQueriesHoldNoStrayAt(t *testing.T) {
	t.Parallel()
	for name, sql := range generatedQueries(t) {
		require.NoError(t, checkNoStrayAt(sql), name)
	}
	for _, bad := range []string{
		"SELECT 1 WHERE a =@user_id",
		"SELECT @ $1",
		"SELECT '@' || @x",
		"SELECT 1 -- @\n, @x",
		"SELECT /* /* @ */ @ */ @x",
		`SELECT E'\'' || @x || '''`,
		"SELECT $$@$$ || @x",
	} {
		require.Error(t, checkNoStrayAt(bad), bad)
	}
	for _, good := range []string{
		"SELECT $1",
		"SELECT 'a@b', 'it''s @'",
		`SELECT E'\'@'`,
		"SELECT 1 -- @x",
		"SELECT /* /* @ */ @ */ 1",
		"SELECT $$@$$, $a$ @ $$ @ $a$, $1",
	} {
		require.NoError(t, checkNoStrayAt(good), good)
	}
}

func TestGeneratedListsAreOrderedAndBounded(t *testing.T) {
	t.Parallel()
	for _, q := range sourceQueries(t) {
		require.NoError(t, checkBounded(q), q.name)
	}
	for _, bad := range []string{
		"SELECT a FROM t",
		"SELECT a FROM t LIMIT 1",
		"SELECT a FROM t ORDER BY a",
		"SELECT a FROM (SELECT a FROM t ORDER BY a LIMIT 1) AS s",
		"SELECT a FROM t -- ORDER BY a LIMIT 1",
		"SELECT 'ORDER BY a LIMIT 1' FROM t",
	} {
		require.Error(t, checkBounded(query{cmd: ":many", sql: bad}), bad)
		require.NoError(t, checkBounded(query{cmd: ":one", sql: bad}), bad)
	}
	for _, good := range []string{
		"SELECT a FROM t ORDER BY a LIMIT @max_rows",
		"select a from t order  by a\nlimit @max_rows",
		"WITH c AS (UPDATE t SET a = 1 WHERE b IN (SELECT b FROM t LIMIT 1) RETURNING a) SELECT a FROM c ORDER BY a",
	} {
		require.NoError(t, checkBounded(query{cmd: ":many", sql: good}), good)
	}
}

func TestGeneratedStatementsUseTransactionLocksOnly(t *testing.T) {
	t.Parallel()
	found := 0
	for _, s := range statements(t) {
		require.NoError(t, checkLockFunctions(s.sql), s.name)
		found += len(lockFunction.FindAllString(sqlCode(s.sql, true), -1))
	}
	require.Positive(t, found, "no lock function in any statement: these tests look at the wrong files")

	for _, bad := range []string{
		"SELECT pg_advisory_lock(1)",
		"SELECT pg_advisory_lock_shared(1)",
		"SELECT pg_try_advisory_lock(1)",
		"SELECT pg_advisory_unlock(1)",
		"SELECT pg_advisory_unlock_all()",
		"SELECT pg_catalog.PG_ADVISORY_LOCK(1)",
		`SELECT "pg_advisory_lock"(1)`,
		"SELECT pg_advisory_xact_lock(1, 2)",
		"SELECT pg_advisory_xact_lock(hashtext($1), ($2))",
		"SELECT pg_advisory_xact_lock",
		"CREATE FUNCTION f() RETURNS void LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_lock(1); END $$",
		"DO $a$ BEGIN EXECUTE $b$ SELECT pg_advisory_unlock_all() $b$; END $a$",
	} {
		require.Error(t, checkLockFunctions(bad), bad)
	}
	for _, good := range []string{
		"SELECT pg_advisory_xact_lock(1)",
		"SELECT pg_catalog.pg_advisory_xact_lock_shared(k.key)",
		"SELECT pg_try_advisory_xact_lock ( greatest(1, 2) )",
		"SELECT pg_try_advisory_xact_lock_shared($1)",
		"SELECT 1 -- never pg_advisory_lock(1)",
		"COMMENT ON SCHEMA latchkey IS 'pg_advisory_lock(1) is not used'",
	} {
		require.NoError(t, checkLockFunctions(good), good)
	}
}

// A statement that locks and reads has one snapshot, taken before it waited: its count misses what the last
// holder committed.
func TestGeneratedStatementsLockOrReadNeverBoth(t *testing.T) {
	t.Parallel()
	relations := latchkeyRelations(t)
	require.Contains(t, relations, "setup_requests")
	for _, s := range statements(t) {
		require.NoError(t, checkLockAlone(s.sql, relations), s.name)
	}

	for _, bad := range []string{
		"SELECT pg_advisory_xact_lock(1), count(*) FROM latchkey.setup_requests",
		"WITH l AS (SELECT pg_advisory_xact_lock(1)) SELECT count(*) FROM l, LATCHKEY . setup_requests",
		"SELECT pg_advisory_xact_lock(1), count(*) FROM setup_requests",
		`SELECT pg_advisory_xact_lock(1), count(*) FROM "setup_requests"`,
		"WITH l AS (SELECT pg_try_advisory_xact_lock(1) AS ok) INSERT INTO latchkey.setup_requests (id) SELECT $1 FROM l",
		"CREATE FUNCTION f() RETURNS bigint LANGUAGE sql STABLE AS $$ SELECT pg_advisory_xact_lock(1); SELECT count(*) FROM latchkey.setup_requests $$",
	} {
		require.Error(t, checkLockAlone(bad, relations), bad)
	}
	for _, good := range []string{
		"SELECT pg_advisory_xact_lock(1) -- then count latchkey.setup_requests",
		"SELECT pg_advisory_xact_lock(latchkey.lock_key('setup_requests', $1))",
		"SELECT count(*) FROM latchkey.setup_requests",
	} {
		require.NoError(t, checkLockAlone(good, relations), good)
	}
}

// Every statement of the module is in queries/, where DBAs read it, and is checked by the tests above.
func TestGeneratedStatementsAreTheOnlyOnesOfTheRepository(t *testing.T) {
	t.Parallel()
	for path, source := range readFiles(t, "../repository/*.go") {
		if !strings.HasSuffix(path, "_test.go") {
			require.NoError(t, checkNoSQL(source), path)
		}
	}
	for _, bad := range []string{
		`var sql = "SELECT 1"`,
		"const sql = `\n  update latchkey.accounts set balance = 0`",
		`func f(q db.DBTX) { q.Exec(ctx, strings.Repeat("X", 2)) }`,
		`func f(tx pgx.Tx) { tx.QueryRow(ctx, fmt.Sprintf("%s", verb)) }`,
		`func f(b *pgx.Batch) { b.Queue(other) }`,
		`func f(tx pgx.Tx, sql string) { func() { tx.Query(ctx, sql + " LIMIT 1") }() }`,
		`func f(c *pgx.Conn) { c.CopyFrom(ctx, table, columns, rows) }`,
	} {
		require.Error(t, checkNoSQL("package p\n"+bad), bad)
	}
	for _, good := range []string{
		`var text = "selected: 1"`,
		`func (t *Tx) Exec(ctx context.Context, sql string, args ...any) { t.tx.Exec(ctx, sql, args...) }`,
		`func f(q *db.Queries) { q.SetupGet(ctx, id) }`,
	} {
		require.NoError(t, checkNoSQL("package p\n"+good), good)
	}
}

func TestGeneratedCheckersSplitStatements(t *testing.T) {
	t.Parallel()
	require.Equal(t,
		[]string{"SELECT ';', \"a;b\"", "DO $$ x; y $$", "SELECT 1 -- ;\n/* ; */ + 1"},
		splitStatements("SELECT ';', \"a;b\";\nDO $$ x; y $$;\n\nSELECT 1 -- ;\n/* ; */ + 1;\n-- the end\n"))
	require.Equal(t,
		[]query{{"A", ":one", "-- name: A :one\n-- doc\nSELECT 1;\n"}, {"B", ":many", "-- name: B :many\nSELECT 2;\n"}},
		splitQueries("-- name: A :one\n-- doc\nSELECT 1;\n-- name: B :many\nSELECT 2;\n"))
}

func checkNoStrayAt(sql string) error {
	// Also none of the operators that hold one, such as @>: none is used, and sqlc's =@x becomes one.
	if strings.Contains(sqlCode(sql, false), "@") {
		return errors.New("an @ is left in the SQL: write a parameter as '= @x', with the space")
	}
	return nil
}

var (
	orderBy = regexp.MustCompile(`(?i)\border\s+by\b`)
	limit   = regexp.MustCompile(`(?i)\blimit\b`)
)

func checkBounded(q query) error {
	if q.cmd != ":many" {
		return nil
	}
	code := sqlCode(q.sql, false)
	if !orderBy.MatchString(outermost(code)) {
		return errors.New(":many without an outermost ORDER BY")
	}
	// The bound may stand inside: UPDATE ... WHERE id IN (SELECT ... LIMIT n) RETURNING has none of its own.
	if !limit.MatchString(code) {
		return errors.New(":many without LIMIT")
	}
	return nil
}

var (
	lockFunction  = regexp.MustCompile(`(?i)\bpg_(?:try_)?advisory\w*`)
	lockFunctions = []string{
		"pg_advisory_xact_lock", "pg_advisory_xact_lock_shared",
		"pg_try_advisory_xact_lock", "pg_try_advisory_xact_lock_shared",
	}
)

func checkLockFunctions(sql string) error {
	code := sqlCode(sql, true)
	for _, at := range lockFunction.FindAllStringIndex(code, -1) {
		name := strings.ToLower(code[at[0]:at[1]])
		if !slices.Contains(lockFunctions, name) {
			return fmt.Errorf("%s is not a transaction lock", name)
		}
		args, ok := strings.CutPrefix(strings.TrimLeft(code[at[1]:], "\" \t\n"), "(")
		if !ok {
			return fmt.Errorf("%s is not called", name)
		}
		// From the opening parenthesis on, the outermost part ends where the call does.
		if args, _, _ = strings.Cut(outermost(args), ")"); strings.Contains(args, ",") {
			return fmt.Errorf("%s with two numbers is another lock than with one bigint", name)
		}
	}
	return nil
}

func checkLockAlone(sql string, relations []string) error {
	code := sqlCode(sql, true)
	if !lockFunction.MatchString(code) {
		return nil
	}
	for _, r := range relations {
		if regexp.MustCompile(`(?i)\b` + r + `\b`).MatchString(code) {
			return fmt.Errorf("takes an advisory lock and names %s in one statement", r)
		}
	}
	return nil
}

var (
	statementText = regexp.MustCompile(`(?i)^\s*(select\s|insert\s+into\s|update\s+\S+\s+(as\s+\w+\s+)?set\s|delete\s+from\s|with\s+(recursive\s+)?\w+\s+as\s|` +
		`begin\b|commit\b|rollback\b|savepoint\s|set\s+(local|session)\s|listen\s|notify\s|call\s+[\w.]+\s*\(|do\s+\$|copy\s|truncate\s|lock\s+table\s|merge\s+into\s)`)
	// takesSQL are the methods of pgx that take a statement, and which of their arguments it is.
	takesSQL = map[string]int{"Exec": 1, "Query": 1, "QueryRow": 1, "Prepare": 2, "Queue": 0, "CopyFrom": 1}
)

// checkNoSQL finds a statement in Go code, and one that is sent without having come as the parameter sql.
func checkNoSQL(source string) error {
	file, err := parser.ParseFile(token.NewFileSet(), "", source, parser.SkipObjectResolution)
	ast.Inspect(file, func(n ast.Node) bool {
		if e, ok := n.(ast.Expr); ok {
			if text, ok := constantString(e); ok && statementText.MatchString(text) {
				err = fmt.Errorf("a statement outside of queries/: %s", text)
			}
		}
		call, ok := n.(*ast.CallExpr)
		if !ok {
			return true
		}
		method, ok := call.Fun.(*ast.SelectorExpr)
		if !ok {
			return true
		}
		if at, ok := takesSQL[method.Sel.Name]; ok && at < len(call.Args) {
			if arg, ok := call.Args[at].(*ast.Ident); !ok || arg.Name != "sql" {
				err = fmt.Errorf("%s sends a statement that did not come as the parameter sql", method.Sel.Name)
			}
		}
		return true
	})
	return err
}

type query struct{ name, cmd, sql string }

var queryHead = regexp.MustCompile(`(?m)^-- name: (\w+) (:\w+)`)

func splitQueries(file string) []query {
	var queries []query
	heads := queryHead.FindAllStringSubmatchIndex(file, -1)
	for i, h := range heads {
		end := len(file)
		if i+1 < len(heads) {
			end = heads[i+1][0]
		}
		queries = append(queries, query{file[h[2]:h[3]], file[h[4]:h[5]], file[h[0]:end]})
	}
	return queries
}

func sourceQueries(t *testing.T) []query {
	t.Helper()
	var queries []query
	for _, file := range readFiles(t, "../queries/*.sql") {
		queries = append(queries, splitQueries(file)...)
	}
	return queries
}

// generatedQueries returns the SQL constants of db/*.sql.go by the names of their queries.
func generatedQueries(t *testing.T) map[string]string {
	t.Helper()
	queries := map[string]string{}
	for path, source := range readFiles(t, "../db/*.sql.go") {
		file, err := parser.ParseFile(token.NewFileSet(), path, source, parser.SkipObjectResolution)
		require.NoError(t, err)
		ast.Inspect(file, func(n ast.Node) bool {
			value, ok := n.(*ast.ValueSpec)
			if !ok {
				return true
			}
			for _, v := range value.Values {
				if sql, ok := constantString(v); ok {
					if head := queryHead.FindStringSubmatch(sql); head != nil {
						queries[head[1]] = sql
					}
				}
			}
			return true
		})
	}
	require.NotEmpty(t, queries)
	return queries
}

// constantString evaluates a literal or a sum of literals: sqlc cuts a raw string where the SQL has a backquote.
func constantString(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		s, err := strconv.Unquote(e.Value)
		return s, err == nil
	case *ast.BinaryExpr:
		x, okX := constantString(e.X)
		y, okY := constantString(e.Y)
		return x + y, okX && okY && e.Op == token.ADD
	}
	return "", false
}

// statements returns each statement of the queries and of the migrations, down files too.
func statements(t *testing.T) []query {
	t.Helper()
	list := sourceQueries(t)
	for path, file := range readFiles(t, "../migrations/*.sql") {
		for _, sql := range splitStatements(file) {
			list = append(list, query{name: path, sql: sql})
		}
	}
	return list
}

var createRelation = regexp.MustCompile(`(?i)\bcreate\s+(?:or\s+replace\s+)?(?:unlogged\s+)?(?:materialized\s+)?(?:table|view)\s+latchkey\.(\w+)`)

// latchkeyRelations returns the tables and views that the migrations create.
func latchkeyRelations(t *testing.T) []string {
	t.Helper()
	var relations []string
	for _, file := range readFiles(t, "../migrations/*.up.sql") {
		for _, m := range createRelation.FindAllStringSubmatch(sqlCode(file, true), -1) {
			relations = append(relations, m[1])
		}
	}
	return relations
}

func readFiles(t *testing.T, glob string) map[string]string {
	t.Helper()
	paths, err := filepath.Glob(glob)
	require.NoError(t, err)
	require.NotEmpty(t, paths, glob)
	files := map[string]string{}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		require.NoError(t, err)
		files[path] = string(data)
	}
	return files
}

// splitStatements cuts sql at its semicolons, keeps the text of each statement, and drops what is only comment.
func splitStatements(sql string) []string {
	var list []string
	start, at := 0, 0
	add := func() {
		if s := strings.TrimSpace(sql[start:at]); strings.TrimSpace(sqlCode(s, true)) != "" {
			list = append(list, s)
		}
	}
	for at < len(sql) {
		kind, n := lexeme(sql, at)
		if kind == other && sql[at] == ';' {
			add()
			start = at + n
		}
		at += n
	}
	add()
	return list
}

// sqlCode returns sql with each comment made a space and each string made ”. A dollar-quoted string is
// the body of a function as a rule: with bodies it stays, itself treated the same way.
func sqlCode(sql string, bodies bool) string {
	var b strings.Builder
	for at := 0; at < len(sql); {
		kind, n := lexeme(sql, at)
		text := sql[at : at+n]
		switch {
		case kind == comment:
			b.WriteByte(' ')
		case kind == literal, kind == dollar && !bodies:
			b.WriteString("''")
		case kind == dollar:
			tag := dollarTag.FindString(text)
			b.WriteString(" " + sqlCode(strings.TrimSuffix(text[len(tag):], tag), true) + " ")
		default:
			b.WriteString(text)
		}
		at += n
	}
	return b.String()
}

type kind int

const (
	other kind = iota
	comment
	literal
	dollar
)

var (
	dollarTag = regexp.MustCompile(`^\$(?:[A-Za-z_]\w*)?\$`)
	// An unclosed string goes to the end, so that the lexer always comes to one.
	plain   = regexp.MustCompile(`^(?s:'(?:[^']|'')*'?)`)
	escaped = regexp.MustCompile(`^(?s:[eE]'(?:[^'\\]|''|\\.)*'?)`)
	quoted  = regexp.MustCompile(`^(?s:"[^"]*"?)`)
	line    = regexp.MustCompile(`^--[^\n]*`)
	word    = regexp.MustCompile(`^[A-Za-z_][\w$]*`)
)

// lexeme returns what begins at sql[at], and its length. It knows as much of SQL's lexical rules as it takes to
// tell comments and strings from the rest.
func lexeme(sql string, at int) (kind, int) {
	rest := sql[at:]
	length := func(r *regexp.Regexp) int { return len(r.FindString(rest)) }
	switch c := rest[0]; {
	case c == '\'':
		return literal, length(plain)
	case c == '"':
		return other, length(quoted)
	case strings.HasPrefix(rest, "--"):
		return comment, length(line)
	case strings.HasPrefix(rest, "/*"):
		return comment, blockComment(rest)
	case c == '$':
		tag := dollarTag.FindString(rest)
		if tag == "" {
			return other, 1
		}
		if end := strings.Index(rest[len(tag):], tag); end >= 0 {
			return dollar, 2*len(tag) + end
		}
		return dollar, len(rest)
	}
	if n := length(escaped); n > 0 {
		return literal, n
	}
	// A whole word, so that neither its last letter E nor a $ in it begins a string.
	return other, max(1, length(word))
}

// blockComment returns the length of the comment that sql begins with; such comments nest.
func blockComment(sql string) int {
	depth := 0
	for i := 0; i < len(sql); {
		switch {
		case strings.HasPrefix(sql[i:], "/*"):
			depth++
			i += 2
		case strings.HasPrefix(sql[i:], "*/"):
			depth--
			i += 2
		default:
			i++
		}
		if depth == 0 {
			return i
		}
	}
	return len(sql)
}

// outermost returns the code outside all parentheses, up to and beyond one that closes more than was opened.
func outermost(code string) string {
	var b strings.Builder
	depth := 0
	for _, r := range code {
		switch {
		case r == '(':
			depth++
		case r == ')' && depth > 0:
			depth--
		case depth == 0:
			b.WriteRune(r)
		}
	}
	return b.String()
}
