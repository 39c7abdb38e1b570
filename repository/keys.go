package repository

import (
	"sync"
	"sync/atomic"

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

// Namespace is a kind of thing that is locked, such as "ticket". Locks of different namespaces never meet.
// Declare each once, as a package-level variable, with [MustNamespace].
type Namespace struct {
	name string
	rank int32
}

// NamespaceOption is a setting for [NewNamespace].
type NamespaceOption func(*Namespace)

// Rank places a namespace in the order of locks; it is 0 if not given. Where one transaction takes locks in
// several calls, it must take those of a lower rank first, and within a rank those of a lower key: then it cannot
// deadlock with another that does so too. See [WithLockOrderCheck].
func Rank(n int32) NamespaceOption {
	return func(ns *Namespace) { ns.rank = n }
}

// namespaces is the register of what this process has declared.
var namespaces = struct {
	sync.Mutex
	declared map[string]bool
}{declared: make(map[string]bool)}

// NewNamespace declares a namespace for this process. It returns [ErrInvalid] if the name does not match
// [a-z][a-z0-9_]{0,62}, or is declared already: two parts of a program that use one name for different things
// would wait for each other. latchkey's own are setup_request, account and account_owner. It is safe for concurrent
// use.
func NewNamespace(name string, opts ...NamespaceOption) (Namespace, error) {
	if err := lockkey.CheckNamespace(name); err != nil {
		return Namespace{}, &InvalidError{"name", err.Error()}
	}
	n := Namespace{name: name}
	for _, opt := range opts {
		if opt == nil {
			return Namespace{}, &InvalidError{"opts", "must not hold a nil NamespaceOption"}
		}
		opt(&n)
	}
	namespaces.Lock()
	defer namespaces.Unlock()
	if namespaces.declared[name] {
		return Namespace{}, &InvalidError{"name", "is declared already: " + name}
	}
	namespaces.declared[name] = true
	return n, nil
}

// MustNamespace is [NewNamespace] for package-level variables; it panics where that returns an error.
func MustNamespace(name string, opts ...NamespaceOption) Namespace {
	n, err := NewNamespace(name, opts...)
	if err != nil {
		panic("latchkey: namespace: " + err.Error())
	}
	return n
}

// Exclusive returns the lock of id that nobody else can hold at the same time.
func (n Namespace) Exclusive(id string) Lock { return Lock{n, id, true} }

// Shared returns the lock of id that others can hold at the same time, if theirs is shared too.
func (n Namespace) Shared(id string) Lock { return Lock{n, id, false} }

// Lock is an advisory lock that a call asks for. It is a value: nothing is locked by making one.
type Lock struct {
	namespace Namespace
	id        string
	exclusive bool
}

// key returns the lock's key, and remembers which lock it stands for.
func (l Lock) key() int64 {
	key := lockkey.Sum(l.namespace.name, l.id)
	if seen := recent.slot(key).Load(); seen == nil || seen.namespace != l.namespace || seen.id != l.id {
		stored := l // l itself stays off the heap
		recent.slot(key).Store(&stored)
	}
	return key
}

// recentLocks remembers locks by their keys, for those who see nothing but keys, such as readers of pg_locks. It
// holds one lock per slot, the latest, so its memory is bounded and looking into it needs no lock.
type recentLocks [4096]atomic.Pointer[Lock]

var recent recentLocks

func (r *recentLocks) slot(key int64) *atomic.Pointer[Lock] {
	return &r[uint64(key)%uint64(len(r))]
}

// named returns the lock with this key, if this process asked for it recently.
func (r *recentLocks) named(key int64) (l Lock, ok bool) {
	if seen := r.slot(key).Load(); seen != nil && lockkey.Sum(seen.namespace.name, seen.id) == key {
		return *seen, true
	}
	return Lock{}, false
}
