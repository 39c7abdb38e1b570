package racelab

// All returns every experiment, in the order in which they tell the story.
func All() []Experiment {
	repeatableRead := map[string]string{"default_transaction_isolation": "repeatable read"}

	all := []Experiment{
		{
			Name:    "check-then-insert",
			Summary: "count, then insert: what most code does",
			Want:    Result{Callers: 2, Limit: 1, Created: 2, Rows: 2},
			run:     handWritten{check: countPending}.race,
		},
		{
			Name:    "for-update",
			Summary: "count with FOR UPDATE: it cannot lock the row that is not there yet",
			Want:    Result{Callers: 2, Limit: 1, Created: 2, Rows: 2},
			run:     handWritten{check: countPendingForUpdate}.race,
		},
		{
			Name:    "parent-row-lock",
			Summary: "lock the user's row first: right, if there is one and everybody does it",
			Want:    Result{Callers: 2, Limit: 1, Created: 1, Refused: 1, Rows: 1, Holds: true},
			run:     handWritten{lock: lockParentRow, check: countPending}.race,
		},
		{
			Name:    "advisory-lock",
			Summary: "latchkey: CreateSetup, twice at once",
			Want:    Result{Callers: 2, Limit: 1, Created: 1, Refused: 1, Rows: 1, Holds: true},
			schema:  latchkeySchema,
			run:     raceLatchkey,
		},
		{
			Name:    "advisory-lock-limit-3",
			Summary: "latchkey: five calls at once for a user who may have three",
			Want:    Result{Callers: 5, Limit: 3, Created: 3, Refused: 2, Rows: 3, Holds: true},
			schema:  latchkeySchema,
			run:     raceLatchkey,
		},
		{
			Name:    "other-user-not-blocked",
			Summary: "latchkey: A holds a user's lock, B wants it, C calls for another user",
			Want:    Result{Callers: 3, Limit: 1, Created: 1, Busy: 1, Rows: 1, Holds: true},
			schema:  latchkeySchema,
			run:     otherUserNotBlocked,
		},
		{
			Name:    "lock-busy",
			Summary: "latchkey: A keeps the lock, B waits no longer than its 200 ms",
			Want:    Result{Callers: 2, Limit: 1, Created: 1, Busy: 1, Rows: 1, Holds: true},
			schema:  latchkeySchema,
			run:     lockBusy,
		},
		{
			Name:    "try-lock",
			Summary: "latchkey: A keeps the lock, B does not wait at all",
			Want:    Result{Callers: 2, Limit: 1, Created: 1, Busy: 1, Rows: 1, Holds: true},
			schema:  latchkeySchema,
			run:     tryLock,
		},
		{
			Name:    "session-lock-survives-rollback",
			Summary: "pg_advisory_lock instead of pg_advisory_xact_lock: rolled back, still held",
			Want:    Result{Callers: 2, Limit: 1, Busy: 1},
			schema:  latchkeySchema,
			run:     sessionLockSurvivesRollback,
		},
		{
			Name:    "unique-index-catches-the-broken-code",
			Summary: "check-then-insert on latchkey's table: its unique index lets one through",
			Want:    Result{Callers: 3, Limit: 1, Created: 1, Errors: 2, Rows: 1, Holds: true},
			schema:  latchkeySchema,
			run:     handWritten{check: countPending}.race,
		},
		{
			Name:     "repeatable-read-default-broken",
			Summary:  "the advisory lock by hand, where REPEATABLE READ is the default",
			Want:     Result{Callers: 2, Limit: 1, Created: 2, Rows: 2},
			settings: repeatableRead,
			run:      handWritten{lock: lockAdvisory, check: countPending}.race,
		},
		{
			Name:     "repeatable-read-default",
			Summary:  "latchkey, where REPEATABLE READ is the default",
			Want:     Result{Callers: 2, Limit: 1, Created: 1, Refused: 1, Rows: 1, Holds: true},
			schema:   latchkeySchema,
			settings: repeatableRead,
			run:      raceLatchkey,
		},
		{
			Name:    "serializable",
			Summary: "check-then-insert under SERIALIZABLE, again after every 40001",
			Want:    Result{Callers: 2, Limit: 1, Created: 1, Refused: 1, Rows: 1, Holds: true},
			run:     handWritten{isolation: "serializable", check: countPending}.race,
		},
		{
			Name:    "lock-and-count-in-one-statement",
			Summary: "lock and count in one CTE: the count's snapshot is older than the lock",
			Want:    Result{Callers: 2, Limit: 1, Created: 2, Rows: 2},
			run:     handWritten{check: lockAndCountPending}.race,
		},
	}
	for i := range all {
		all[i].Want.Name = all[i].Name
		if all[i].schema == "" {
			all[i].schema = ownSchema
		}
	}
	return all
}
