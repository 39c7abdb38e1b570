package repository

import (
	"sync"

	"github.com/latchkey-go/latchkey/internal/lockkey"
)

// Key returns the advisory lock key of an id in a namespace: the first 8 bytes, big-endian and signed, of
// SHA-256 of the UTF-8 text namespace + ":" + id. It is the same in every language and every version; in SQL
// it is latchkey.lock_key(namespace, id).
//
// namespace must match [a-z][a-z0-9_]{0,62}; id must be 1 to 1024 bytes of UTF-8 without NUL. A UUID is given
// in lower case with hyphens. Otherwise the error is [ErrInvalid].
func Key(namespace, id string) (int64, error) {
	if err := lockkey.CheckNamespace(namespace); err != nil {
		return 0, &InvalidError{"namespace", err.Error()}
	}
	if err := lockkey.CheckID(id); err != nil {
		return 0, &InvalidError{"id", err.Error()}
	}
	return lockkey.Sum(namespace, id), nil
}

// Namespace is a kind of thing that is locked, such as "account". Locks of different namespaces never meet.
// Declare each once, as a package-level variable, with [MustNamespace].
type Namespace struct{ name string }

var declared = struct {
	sync.Mutex
	names map[string]bool
}{names: make(map[string]bool)}

// NewNamespace declares a namespace for this process. It returns [ErrInvalid] if the name does not match
// [a-z][a-z0-9_]{0,62}, or is declared already: two parts of a program that use one name for different things
// would wait for each other. latchkey's own is setup_request. It is safe for concurrent use.
func NewNamespace(name string) (Namespace, error) {
	if err := lockkey.CheckNamespace(name); err != nil {
		return Namespace{}, &InvalidError{"name", err.Error()}
	}
	declared.Lock()
	defer declared.Unlock()
	if declared.names[name] {
		return Namespace{}, &InvalidError{"name", "is declared already: " + name}
	}
	declared.names[name] = true
	return Namespace{name}, nil
}

// MustNamespace is [NewNamespace] for package-level variables; it panics where that returns an error.
func MustNamespace(name string) Namespace {
	n, err := NewNamespace(name)
	if err != nil {
		panic("latchkey: namespace: " + err.Error())
	}
	return n
}

// Exclusive returns the lock of id that nobody else can hold at the same time.
func (n Namespace) Exclusive(id string) Lock { return Lock{n.name, id, true} }

// Shared returns the lock of id that others can hold at the same time, if theirs is shared too.
func (n Namespace) Shared(id string) Lock { return Lock{n.name, id, false} }

// Lock is an advisory lock that a call asks for. It is a value: nothing is locked by making one.
type Lock struct {
	namespace, id string
	exclusive     bool
}
