package index

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"time"
)

var (
	// ErrChanged: somebody else has changed the repository. What was decided by its state has to be decided again.
	ErrChanged = errors.New("the repository was changed meanwhile")
	// ErrLeaseLost: the lease is not, or no longer, of that holder.
	ErrLeaseLost = errors.New("somebody else has the lease")
)

// Next has Apply fail with ErrChanged unless Seq is the one after the last number of a repository, which it then is. So
// what is decided by the state of a repository since Last was asked is decided by the state in which it is applied,
// whichever process decides. A repository whose changes carry a Next must not be given numbers by NextSeq.
type Next struct {
	Repo string
	Seq  uint64
}

func (o Next) check() error { return checkName(o.Repo, o.Seq) }

func (o Next) apply(t *change) error {
	n, err := t.number(sequenceKey(o.Repo))
	if err != nil {
		return err
	}
	if n != o.Seq-1 {
		return fmt.Errorf("change %d of %s: %w", o.Seq, o.Repo, ErrChanged)
	}
	return t.store(sequenceKey(o.Repo), encodeNumber(o.Seq))
}

// Last returns the number of the last change of a repository; 0: there was none.
func (ix *Index) Last(ctx context.Context, repo string) (seq uint64, err error) {
	if err := checkText("repository", repo); err != nil {
		return 0, err
	}
	err = ix.view(ctx, func(t tx) error {
		seq, err = t.number(sequenceKey(repo))
		return err
	})
	return seq, err
}

// Owe keeps the refs of a change until Paid: the store may not have them yet.
type Owe struct {
	Repo string
	Seq  uint64
	Refs []byte // as blobstore.EncodeRefs has them
	At   time.Time
}

func (o Owe) check() error { return cmp.Or(checkName(o.Repo, o.Seq), checkTime("at", o.At)) }

func (o Owe) apply(t *change) error {
	var b body
	b.time(o.At)
	b.text(string(o.Refs))
	return t.store(owedKey(o.Repo, o.Seq), b)
}

// Paid forgets what was owed for a change: the store has it. It is no error if it is forgotten already.
type Paid struct {
	Repo string
	Seq  uint64
}

func (o Paid) check() error { return checkName(o.Repo, o.Seq) }

func (o Paid) apply(t *change) error { return t.Delete(owedKey(o.Repo, o.Seq)) }

// Owed yields what is owed for changes of a repository, or of all where repo is empty, in order of repository and
// number.
func (ix *Index) Owed(ctx context.Context, repo string) iter.Seq2[Owe, error] {
	prefix := in(tableOwed)
	if repo != "" {
		prefix = prefix.text(repo)
	}
	return paged(ctx, ix, prefix, func(t tx, from []byte, p *page[Owe]) error {
		return t.walk(from, after(prefix), func(k, v []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			parts := split(k)
			o := Owe{Repo: parts.text(), Seq: parts.time()}
			b, err := unseal(k, v)
			if err := cmp.Or(err, parts.err()); err != nil {
				return nil, err
			}
			r := reader{left: b}
			o.At, o.Refs = r.time(), []byte(r.text())
			p.add(o, len(k)+len(v))
			return nil, r.err("refs owed")
		})
	})
}

// Clock is implemented by engines that have a clock of their own, which is the same for all processes.
type Clock interface {
	Now(ctx context.Context) (time.Time, error)
}

// Now is the time by which leases and the presence of processes are counted: that of the engine, or else of this
// machine.
func (ix *Index) Now(ctx context.Context) (time.Time, error) {
	if c, ok := ix.kv.(Clock); ok {
		return c.Now(ctx)
	}
	return time.Now(), nil
}

// Lease is who has something to itself among the processes that use the index.
type Lease struct {
	Name   string
	Holder string
	Until  time.Time
}

func (t tx) leaseOf(name string) (l Lease, err error) {
	b, err := t.load(holderKey(name))
	if err != nil || b == nil {
		return l, err
	}
	r := reader{left: b}
	l = Lease{name, r.text(), r.time()}
	return l, r.err("lease of a name")
}

// TakeLease takes or renews a lease until a time, by Now, unless another holder has it. It returns who has it then. A
// holder that was stopped for a while may not know that it has lost it: what must not happen then carries a Held.
func (ix *Index) TakeLease(ctx context.Context, want Lease, now time.Time) (has Lease, err error) {
	if err := cmp.Or(checkText("name of a lease", want.Name), checkTime("until", want.Until)); err != nil {
		return has, err
	}
	err = ix.kv.Update(ctx, func(x Txn) error {
		t := tx{x}
		has, err = t.leaseOf(want.Name)
		if err != nil || has.Holder != "" && has.Holder != want.Holder && now.Before(has.Until) {
			return err
		}
		has = want
		var b body
		b.text(want.Holder)
		b.time(want.Until)
		return t.store(holderKey(want.Name), b)
	})
	if err != nil {
		return Lease{}, fmt.Errorf("take lease %s: %w", want.Name, err)
	}
	return has, nil
}

// EndLease gives a lease back, if its holder is that one.
func (ix *Index) EndLease(ctx context.Context, name, holder string) error {
	return ix.kv.Update(ctx, func(x Txn) error {
		t := tx{x}
		l, err := t.leaseOf(name)
		if err != nil || l.Holder != holder {
			return err
		}
		return t.Delete(holderKey(name))
	})
}

// Held has Apply fail with ErrLeaseLost unless the holder has the lease, whether or not its time is over.
type Held struct{ Name, Holder string }

func (o Held) check() error { return checkText("name of a lease", o.Name) }

func (o Held) apply(t *change) error { return o.holds(t.tx) }

func (o Held) holds(t tx) error {
	l, err := t.leaseOf(o.Name)
	if err == nil && l.Holder != o.Holder {
		err = fmt.Errorf("lease %s: %w", o.Name, ErrLeaseLost)
	}
	return err
}

// Present says that a process uses the index, and until when it is to be believed that it still does. Without Until it
// does no more.
type Present struct{ Replica }

// Replica is a process that uses the index.
type Replica struct {
	ID    string
	Host  string    // for people
	Heard time.Time // when it said so
	Until time.Time
}

func (o Present) check() error {
	if o.Until.IsZero() {
		return checkText("id of a replica", o.ID)
	}
	return cmp.Or(checkText("id of a replica", o.ID), checkTime("heard", o.Heard), checkTime("until", o.Until))
}

func (o Present) apply(t *change) error {
	if o.Until.IsZero() {
		return t.Delete(replicaKey(o.ID))
	}
	var b body
	b.text(o.Host)
	b.time(o.Heard)
	b.time(o.Until)
	return t.store(replicaKey(o.ID), b)
}

// Replicas yields the processes that have said that they use the index, in order of id, also those whose time is over.
func (ix *Index) Replicas(ctx context.Context) iter.Seq2[Replica, error] {
	return paged(ctx, ix, in(tableReplica), func(t tx, from []byte, p *page[Replica]) error {
		return t.walk(from, after(in(tableReplica)), func(k, v []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			b, err := unseal(k, v)
			if err != nil {
				return nil, err
			}
			r := reader{left: b}
			p.add(Replica{ID: split(k).rest(), Host: r.text(), Heard: r.time(), Until: r.time()}, len(k)+len(v))
			return nil, r.err("replica")
		})
	})
}
