package repository

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgtype"
)

// ListOpts choose a page of a list, newest first; nil is the default of each.
type ListOpts struct {
	// Limit is how many rows come back at most: 1 to 1000; 0 is 100.
	Limit int

	// After is the [Cursor] of the last row of the page before; the zero Cursor starts with the newest.
	After Cursor
}

// Cursor is a place in a list. Rows that are added meanwhile do not move it.
type Cursor struct {
	CreatedAt time.Time
	ID        uuid.UUID
}

// afterAll is a Cursor before which every row comes.
var afterAll = Cursor{CreatedAt: time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC), ID: uuid.Max}

// page checks the options and fills in the defaults.
func (o *ListOpts) page() (limit int32, after Cursor, err error) {
	if o == nil {
		o = &ListOpts{}
	}
	if limit, err = count("Limit", o.Limit, defaultRows, maxListLimit); err != nil {
		return 0, Cursor{}, err
	}
	after = o.After
	switch {
	case after == (Cursor{}):
		after = afterAll
	case !isOfRow(after.CreatedAt) || after.ID == uuid.Nil:
		return 0, Cursor{}, &InvalidError{"After", "must be the Cursor of a row"}
	}
	return limit, after, nil
}

// isOfRow tells whether a time can be one that the server's clock gave a row. What is far from that, pgx would send as
// another time: its count of microseconds overflows.
func isOfRow(at time.Time) bool {
	return at.UTC().Year() > 1 && at.UTC().Year() <= afterAll.CreatedAt.Year()
}

const (
	// defaultRows is how many rows come back if nothing is said.
	defaultRows = 100

	// maxListLimit bounds what one call holds in memory.
	maxListLimit = 1000

	// maxIdempotencyKey holds any key in use, such as two UUIDs or a hash. The table's CHECK says the same.
	maxIdempotencyKey = 255

	// maxName is for topics, aggregate keys, workers and leases; the tables' CHECKs say the same.
	maxName = 255
)

// idempotencyKey checks a key; nil is none.
func idempotencyKey(key string) (*string, error) {
	if key == "" {
		return nil, nil
	}
	if err := checkText("IdempotencyKey", key, maxIdempotencyKey); err != nil {
		return nil, err
	}
	used := key // key itself stays off the heap
	return &used, nil
}

// checkText checks that PostgreSQL can hold the text, and that it is no longer than limit, in bytes.
func checkText(argument, text string, limit int) error {
	switch {
	case len(text) > limit:
		return &InvalidError{argument, fmt.Sprintf("must be at most %d bytes long", limit)}
	case !utf8.ValidString(text):
		return &InvalidError{argument, "must be valid UTF-8"}
	case strings.ContainsRune(text, 0):
		return &InvalidError{argument, "must not hold a NUL byte"}
	}
	return nil
}

// checkName is checkText for what must have a name.
func checkName(argument, name string) error {
	if name == "" {
		return &InvalidError{argument, "must not be empty"}
	}
	return checkText(argument, name, maxName)
}

// maxTimeout is in whole days what PostgreSQL can hold in a 32-bit count of milliseconds.
const maxTimeout = 24 * 24 * time.Hour

// timeout checks a duration; 0 is fallback.
func timeout(argument string, d, fallback time.Duration) (time.Duration, error) {
	switch {
	case d == 0:
		return fallback, nil
	case d < time.Millisecond || d > maxTimeout: // the server counts whole milliseconds, and 0 is for ever
		return 0, &InvalidError{argument, "must be 0 or from 1ms to 576h"}
	}
	return d, nil
}

// count checks a number of rows, places or attempts; 0 is fallback.
func count(argument string, n, fallback, limit int) (int32, error) {
	switch {
	case n == 0:
		return int32(fallback), nil
	case n < 0 || n > limit:
		return 0, &InvalidError{argument, fmt.Sprintf("must be 0 or from 1 to %d", limit)}
	}
	return int32(n), nil
}

// pgUUID is an id as the statements take it. A uuid.UUID would go through its text, at many times the cost.
func pgUUID(id uuid.UUID) pgtype.UUID { return pgtype.UUID{Bytes: id, Valid: true} }
