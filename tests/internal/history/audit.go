package history

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
)

// rules are what must hold in the tables, whatever the histories are. Each finds what breaks it.
var rules = []struct{ name, sql string }{
	{"more were pending than may be, at the moment that one was made", `
		SELECT s.id::text
		FROM latchkey.setup_requests AS s
		WHERE s.max_pending < (
			SELECT pg_catalog.count(*)
			FROM latchkey.setup_requests AS other
			WHERE other.user_id = s.user_id
				AND (other.created_at, other.id) <= (s.created_at, s.id)
				AND (other.ended_at IS NULL OR other.ended_at > s.created_at)
		)`},
	{"the balance is not what the entries add up to", `
		SELECT a.id::text
		FROM latchkey.accounts AS a
		WHERE a.balance <> (
			SELECT coalesce(pg_catalog.sum(CASE WHEN e.kind IN ('deposit', 'transfer_in') THEN e.amount ELSE -e.amount END), 0)
			FROM latchkey.entries AS e
			WHERE e.account_id = a.id
		)`},
	{"an entry does not follow from the one before", `
		SELECT e.id::text
		FROM (
			SELECT e.id, e.balance_after, CASE WHEN e.kind IN ('deposit', 'transfer_in') THEN e.amount ELSE -e.amount END AS change,
				coalesce(pg_catalog.lag(e.balance_after) OVER (PARTITION BY e.account_id ORDER BY e.created_at), 0) AS before
			FROM latchkey.entries AS e
		) AS e
		WHERE e.balance_after <> e.before + e.change`},
	{"more left the account on a day than its limit", `
		SELECT a.id::text
		FROM latchkey.accounts AS a
		JOIN latchkey.entries AS e ON e.account_id = a.id AND e.kind IN ('withdrawal', 'transfer_out')
		WHERE a.daily_limit > 0
		GROUP BY a.id, (e.created_at AT TIME ZONE a.time_zone)::date
		HAVING pg_catalog.sum(e.amount) > a.daily_limit`},
	{"a transfer does not have its two entries", `
		SELECT t.id::text
		FROM latchkey.transfers AS t
		WHERE 1 <> (
			SELECT pg_catalog.count(*) FROM latchkey.entries AS e
			WHERE e.transfer_id = t.id AND e.kind = 'transfer_out' AND e.account_id = t.from_account_id AND e.amount = t.amount
		) OR 1 <> (
			SELECT pg_catalog.count(*) FROM latchkey.entries AS e
			WHERE e.transfer_id = t.id AND e.kind = 'transfer_in' AND e.account_id = t.to_account_id AND e.amount = t.amount
		)`},
	{"somebody has an advisory lock, or waits for one", `
		SELECT l.pid::text
		FROM pg_catalog.pg_locks AS l
		JOIN pg_catalog.pg_database AS d ON d.oid = l.database
		WHERE l.locktype = 'advisory' AND d.datname = pg_catalog.current_database()`},
}

// Audit looks in latchkey's tables and in pg_locks for what must not be, whatever the calls were, and returns a line for
// each. Nobody may be using the database.
func Audit(ctx context.Context, conn *pgx.Conn) (broken []string, err error) {
	for _, rule := range rules {
		rows, err := conn.Query(ctx, rule.sql)
		if err != nil {
			return nil, err
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", rule.name, err)
		}
		for _, id := range ids {
			broken = append(broken, rule.name+": "+id)
		}
	}
	return broken, nil
}
