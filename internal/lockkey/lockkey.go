// Package lockkey turns a namespace and an id into the 64-bit key of a PostgreSQL advisory lock.
//
// The key is the first 8 bytes, big-endian and signed, of SHA-256 of the UTF-8 text
//
//	namespace + ":" + id
//
// This is a contract with every other program that takes the same locks, in any language, and never
// changes. The SQL function latchkey.lock_key computes the same; testdata/vectors.json pins both.
package lockkey

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"strings"
	"unicode/utf8"
)

const (
	// MaxNamespace is the longest namespace in bytes: PostgreSQL's own limit for a name, so a
	// namespace can be named after a table.
	MaxNamespace = 63

	// MaxID is the longest id in bytes. It bounds what one call can make the server hash, and lets
	// Sum work without allocating.
	MaxID = 1024
)

// The errors below name the rule, never the input: an id may be long or secret.
var (
	errNamespaceEmpty  = errors.New("must not be empty")
	errNamespaceLength = errors.New("must be at most 63 characters long")
	errNamespaceChars  = errors.New("must begin with a-z and hold only a-z, 0-9 and _")
	errIDEmpty         = errors.New("must not be empty")
	errIDLength        = errors.New("must be at most 1024 bytes long")
	errIDUTF8          = errors.New("must be valid UTF-8")
	errIDNUL           = errors.New("must not hold a NUL byte")
)

// CheckNamespace reports how namespace breaks the pattern [a-z][a-z0-9_]{0,62}, or nil. The pattern
// has no colon, so the hashed text can be read in one way only.
func CheckNamespace(namespace string) error {
	switch {
	case namespace == "":
		return errNamespaceEmpty
	case len(namespace) > MaxNamespace:
		return errNamespaceLength
	case namespace[0] < 'a' || namespace[0] > 'z':
		return errNamespaceChars
	}
	for i := 1; i < len(namespace); i++ {
		c := namespace[i]
		if (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' {
			return errNamespaceChars
		}
	}
	return nil
}

// CheckID reports why id cannot be part of a key, or nil: it is text that PostgreSQL can store, not
// empty, and at most [MaxID] bytes long.
func CheckID(id string) error {
	switch {
	case id == "":
		return errIDEmpty
	case len(id) > MaxID:
		return errIDLength
	case !utf8.ValidString(id):
		return errIDUTF8
	case strings.IndexByte(id, 0) >= 0:
		return errIDNUL
	}
	return nil
}

// Sum returns the key of id in namespace. Both must have passed [CheckNamespace] and [CheckID]. It
// does not allocate and may be called from any goroutine.
func Sum(namespace, id string) int64 {
	var buf [MaxNamespace + 1 + MaxID]byte
	text := append(buf[:0], namespace...)
	text = append(text, ':')
	text = append(text, id...)
	sum := sha256.Sum256(text)
	return int64(binary.BigEndian.Uint64(sum[:8]))
}
