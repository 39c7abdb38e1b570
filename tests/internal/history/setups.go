package history

import (
	"slices"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/google/uuid"
)

// The questions of [Setups], and then their answers.
type (
	// Create asks for one more pending row, of which Max may be there; Key is the idempotency key.
	Create struct {
		Key string
		Max int
	}

	// End asks to move a row that is pending to a status.
	End struct {
		ID     uuid.UUID
		Status string
	}

	// Get asks for the status of a row.
	Get struct{ ID uuid.UUID }

	// Count asks how many rows are pending.
	Count struct{}

	// List asks for all rows.
	List struct{}

	// Created is the row that was made, or that an earlier call made under the same key.
	Created struct {
		ID     uuid.UUID
		Status string
	}

	// Refused says that the limit is reached.
	Refused struct{ Used, Limit int }

	// Conflict says that the key was used with other parameters.
	Conflict struct{}

	// Ended says that the row was moved.
	Ended struct{}

	// NotPending says that it had been moved before.
	NotPending struct{}

	// NotFound says that there is no such row.
	NotFound struct{}

	// Got answers Get.
	Got struct{ Status string }

	// Counted answers Count.
	Counted struct{ Pending int }

	// Listed answers List.
	Listed struct{ Rows []Row }
)

// Row is a row as it is read. Of the host's own tables, it has an ID only.
type Row struct {
	ID     uuid.UUID
	Key    string
	Max    int
	Status string
}

// Pending is the status of a row that counts.
const Pending = "pending"

// made is a row of the model. It has no ID as long as nobody has been told.
type made struct {
	Row
	by    int           // the call that made it; the rows are in this order
	ended time.Duration // when the call returned that ended it
}

// Setups is the model of a user's setup requests: at most so many are pending. It is also that of any table whose rows
// are counted under a lock.
//
// Who is refused may have counted rows that were being ended at that moment, which takes no lock: the count may be too
// high by those, but never too low.
func Setups() porcupine.Model {
	return model(nil, slices.Equal[[]made], hashOf[made], stepSetups, func(rows []made, op *Op) []made {
		switch in := op.In.(type) {
		case Create:
			if keyed(rows, in.Key) < 0 && pending(rows) < in.Max {
				return add(rows, made{Row: Row{Key: in.Key, Max: in.Max, Status: Pending}, by: op.Number})
			}
		case End:
			if i := withID(rows, in.ID); i >= 0 && rows[i].Status == Pending {
				return end(rows, i, in.Status, op.Return)
			}
		}
		return rows
	})
}

func stepSetups(rows []made, op *Op) ([]made, bool) {
	switch in := op.In.(type) {
	case Create:
		return stepCreate(rows, op, in)
	case End:
		i := withID(rows, in.ID)
		switch op.Out.(type) {
		case Ended:
			if i >= 0 && rows[i].Status == Pending {
				return end(rows, i, in.Status, op.Return), true
			}
		case NotPending:
			return rows, i >= 0 && rows[i].Status != Pending
		case NotFound:
			return rows, i < 0
		}
	case Get:
		i := withID(rows, in.ID)
		if out, ok := op.Out.(Got); ok {
			return rows, i >= 0 && rows[i].Status == out.Status
		}
		return rows, op.Out == NotFound{} && i < 0
	case Count:
		return rows, op.Out == Counted{pending(rows)}
	case List:
		if out, ok := op.Out.(Listed); ok {
			return rows, lists(rows, out.Rows)
		}
	}
	return rows, false
}

func stepCreate(rows []made, op *Op, in Create) ([]made, bool) {
	earlier := keyed(rows, in.Key)
	switch out := op.Out.(type) {
	case Created:
		known := withID(rows, out.ID)
		switch {
		case earlier < 0:
			row := made{Row: Row{ID: out.ID, Key: in.Key, Max: in.Max, Status: Pending}, by: op.Number}
			return add(rows, row), known < 0 && pending(rows) < in.Max && out.Status == Pending
		case rows[earlier].Max != in.Max || rows[earlier].Status != out.Status:
			return rows, false
		case known < 0 && rows[earlier].ID == uuid.Nil:
			rows = slices.Clone(rows)
			rows[earlier].ID = out.ID
			return rows, true
		}
		return rows, known == earlier
	case Conflict:
		return rows, earlier >= 0 && rows[earlier].Max != in.Max
	case Refused:
		most := pending(rows)
		for _, row := range rows {
			if row.Status != Pending && row.ended >= op.Call {
				most++
			}
		}
		return rows, earlier < 0 && out.Limit == in.Max && out.Used >= out.Limit && pending(rows) <= out.Used && out.Used <= most
	}
	return rows, false
}

func pending(rows []made) (n int) {
	for _, row := range rows {
		if row.Status == Pending {
			n++
		}
	}
	return n
}

func keyed(rows []made, key string) int {
	if key == "" {
		return -1
	}
	return slices.IndexFunc(rows, func(row made) bool { return row.Key == key })
}

func withID(rows []made, id uuid.UUID) int {
	return slices.IndexFunc(rows, func(row made) bool { return row.ID == id })
}

// add keeps the rows in the order of the calls that made them, so that the same rows are the same state.
func add(rows []made, row made) []made {
	i, _ := slices.BinarySearchFunc(rows, row.by, func(other made, by int) int { return other.by - by })
	return slices.Insert(slices.Clone(rows), i, row)
}

func end(rows []made, i int, status string, returned time.Duration) []made {
	rows = slices.Clone(rows)
	rows[i].Status, rows[i].ended = status, returned
	return rows
}

func lists(rows []made, read []Row) bool {
	return match(rows, read, func(row made) Row { return row.Row }, func(r Row) (uuid.UUID, Row) {
		id := r.ID
		r.ID = uuid.Nil
		return id, r
	})
}
