// Package memkv is an index engine in memory that distrusts its callers and fails on demand. It is for tests: what an
// engine may do by its contract, this one does. It runs a function of Update twice when it feels like it, it overwrites
// what it handed out once a transaction is over, and it panics where a caller breaks the contract.
package memkv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"math/rand/v2"
	"slices"
	"sync"

	"github.com/kiln-registry/kiln-registry/index"
)

// Point is where an engine can fail.
type Point string

// The points of failure.
const (
	View   Point = "view"   // before the function runs
	Update Point = "update" // before the function runs
	Read   Point = "read"   // at a Get
	Walk   Point = "walk"   // at a Range, or at a pair of it
	Write  Point = "write"  // at a Put or Delete
	Commit Point = "commit" // when the function has run
)

// Fault is what happens at a point.
type Fault int

// The faults. Both fail the transaction with ErrInjected; a Persisted one at Commit keeps its writes all the same.
const (
	None Fault = iota
	Lost
	Persisted
)

// ErrInjected is the error of every fault.
var ErrInjected = errors.New("injected failure")

// Disk keeps what was made durable, beyond the KV that wrote it. The zero Disk is empty.
type Disk struct {
	mu    sync.Mutex
	pairs []pair // in order of key, never changed in place
	open  bool
}

type pair struct{ key, value []byte }

// Copy returns a Disk with what d holds now, as after a crash.
func (d *Disk) Copy() *Disk {
	d.mu.Lock()
	defer d.mu.Unlock()
	return &Disk{pairs: d.pairs}
}

// Open returns a KV on the disk. seed decides which updates run twice. ErrInUse while another one is open.
func (d *Disk) Open(seed uint64) (*KV, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.open {
		return nil, fmt.Errorf("open disk: %w", index.ErrInUse)
	}
	d.open = true
	return &KV{disk: d, random: rand.New(rand.NewPCG(seed, seed))}, nil
}

// KV is the engine. Any number of goroutines may use one.
type KV struct {
	disk   *Disk
	turn   sync.Mutex // held by the update in progress; guards random
	random *rand.Rand
	mu     sync.Mutex // guards what follows
	fail   func(Point) Fault
	closed bool
}

// Fail makes the engine ask fn at every point what is to happen there; nil: nothing fails. fn must be safe for
// concurrent use and must not use the engine.
func (kv *KV) Fail(fn func(Point) Fault) {
	kv.mu.Lock()
	kv.fail = fn
	kv.mu.Unlock()
}

func (kv *KV) fault(p Point) Fault {
	kv.mu.Lock()
	fn := kv.fail
	kv.mu.Unlock()
	if fn == nil {
		return None
	}
	return fn(p)
}

// Close implements index.KV.
func (kv *KV) Close() error {
	kv.turn.Lock()
	defer kv.turn.Unlock()
	kv.mu.Lock()
	defer kv.mu.Unlock()
	if !kv.closed {
		kv.closed = true
		kv.disk.mu.Lock()
		kv.disk.open = false
		kv.disk.mu.Unlock()
	}
	return nil
}

func (kv *KV) usable(ctx context.Context) error {
	kv.mu.Lock()
	defer kv.mu.Unlock()
	if kv.closed {
		return fmt.Errorf("memory index: %w", fs.ErrClosed)
	}
	return ctx.Err()
}

// View implements index.KV.
func (kv *KV) View(ctx context.Context, fn func(index.Txn) error) error {
	if err := kv.usable(ctx); err != nil {
		return err
	}
	if kv.fault(View) != None {
		return fmt.Errorf("view: %w", ErrInjected)
	}
	t := kv.begin(false)
	defer t.end()
	err := fn(t)
	if t.err != nil {
		return t.err
	}
	return err
}

// Update implements index.KV.
func (kv *KV) Update(ctx context.Context, fn func(index.Txn) error) error {
	kv.turn.Lock()
	defer kv.turn.Unlock()
	if err := kv.usable(ctx); err != nil {
		return err
	}
	if kv.fault(Update) != None {
		return fmt.Errorf("update: %w", ErrInjected)
	}
	pairs, err := kv.run(fn)
	if err == nil && kv.random.IntN(4) == 0 {
		first := pairs
		if pairs, err = kv.run(fn); err == nil && !slices.EqualFunc(first, pairs, equal) {
			panic("memkv: an update that ran twice wrote different things: it has an effect outside its transaction")
		}
	}
	if err != nil {
		return err
	}
	fault := kv.fault(Commit)
	if fault != Lost {
		kv.disk.mu.Lock()
		kv.disk.pairs = pairs
		kv.disk.mu.Unlock()
	}
	if fault != None {
		return fmt.Errorf("commit: %w", ErrInjected)
	}
	return nil
}

func equal(a, b pair) bool { return bytes.Equal(a.key, b.key) && bytes.Equal(a.value, b.value) }

// run runs fn on a private copy and returns what the state becomes.
func (kv *KV) run(fn func(index.Txn) error) ([]pair, error) {
	t := kv.begin(true)
	defer t.end()
	err := fn(t)
	switch {
	case t.err != nil:
		return nil, t.err
	case err != nil:
		return nil, err
	}
	return t.pairs, nil
}

func (kv *KV) begin(writable bool) *txn {
	kv.disk.mu.Lock()
	defer kv.disk.mu.Unlock()
	t := &txn{kv: kv, writable: writable, pairs: kv.disk.pairs}
	if writable {
		t.pairs = slices.Clone(t.pairs)
	}
	return t
}

// txn is one transaction. A writable one owns its slice of pairs, but not the pairs of others that it points to.
type txn struct {
	kv       *KV
	writable bool
	ended    bool
	pairs    []pair
	walking  [][2][]byte // ranges that are being walked
	lent     [][]byte    // what was handed out
	err      error       // the fault that failed it
}

// end overwrites all that was handed out, so that who kept it notices.
func (t *txn) end() {
	t.ended = true
	for _, b := range t.lent {
		for i := range b {
			b[i] = 0xdb
		}
	}
}

func (t *txn) lend(b []byte) []byte {
	c := append(make([]byte, 0, len(b)), b...)
	t.lent = append(t.lent, c)
	return c
}

func (t *txn) find(key []byte) (int, bool) {
	return slices.BinarySearchFunc(t.pairs, key, func(p pair, k []byte) int { return bytes.Compare(p.key, k) })
}

func (t *txn) at(p Point) error {
	if t.ended {
		panic("memkv: transaction used after its end")
	}
	if t.kv.fault(p) != None {
		t.err = fmt.Errorf("%s: %w", p, ErrInjected)
	}
	return t.err
}

// Get implements index.Txn.
func (t *txn) Get(key []byte) ([]byte, error) {
	if err := t.at(Read); err != nil {
		return nil, err
	}
	if i, found := t.find(key); found {
		return t.lend(t.pairs[i].value), nil
	}
	return nil, nil
}

// Put implements index.Txn.
func (t *txn) Put(key, value []byte) error {
	if err := t.write(key); err != nil {
		return err
	}
	p := pair{bytes.Clone(key), append([]byte{}, value...)}
	if i, found := t.find(key); found {
		t.pairs[i] = p
	} else {
		t.pairs = slices.Insert(t.pairs, i, p)
	}
	return nil
}

// Delete implements index.Txn.
func (t *txn) Delete(key []byte) error {
	if err := t.write(key); err != nil {
		return err
	}
	if i, found := t.find(key); found {
		t.pairs = slices.Delete(t.pairs, i, i+1)
	}
	return nil
}

func (t *txn) write(key []byte) error {
	if err := t.at(Write); err != nil {
		return err
	}
	if !t.writable {
		return errors.New("write in a view")
	}
	if len(key) == 0 || len(key) > index.MaxKeyBytes {
		return fmt.Errorf("write a key of %d bytes", len(key))
	}
	for _, r := range t.walking {
		if bytes.Compare(r[0], key) <= 0 && (r[1] == nil || bytes.Compare(key, r[1]) < 0) {
			panic(fmt.Sprintf("memkv: key %q changed in a range that is being walked", key))
		}
	}
	return nil
}

// Range implements index.Txn.
func (t *txn) Range(from, to []byte) iter.Seq2[[]byte, []byte] {
	from, to = bytes.Clone(from), bytes.Clone(to)
	return func(yield func([]byte, []byte) bool) {
		if t.at(Walk) != nil {
			return
		}
		t.walking = append(t.walking, [2][]byte{from, to})
		defer func() { t.walking = t.walking[:len(t.walking)-1] }()
		i, _ := t.find(from)
		for ; i < len(t.pairs); i++ {
			p := t.pairs[i]
			if to != nil && bytes.Compare(p.key, to) >= 0 {
				return
			}
			if t.at(Walk) != nil || !yield(t.lend(p.key), t.lend(p.value)) {
				return
			}
			if i+1 < len(t.pairs) && bytes.Compare(p.key, t.pairs[i+1].key) >= 0 {
				panic("memkv: keys out of order")
			}
		}
	}
}
