package boltkv

import (
	"context"
	"io/fs"

	"go.etcd.io/bbolt"

	"github.com/kiln-registry/kiln-registry/index"
)

// update is one call of Update. Its function runs in the goroutine of the caller, when the committer lends it the
// transaction of the group: so a panic, a Goexit or a fault in it stays where it belongs.
type update struct {
	ctx  context.Context
	fn   func(index.Txn) error
	turn chan *txn     // from the committer: run fn in this
	ran  chan verdict  // to the committer, once after each turn
	done chan error    // from the committer: the outcome, for an update whose fn succeeded or never ran
	gone chan struct{} // closed by the caller when it gave up before its turn
}

// verdict is how a turn went.
type verdict struct {
	failed bool  // the update is out
	wrote  bool  // it changed the transaction before it failed
	damage error // the engine failed
}

// Update implements index.KV.
func (kv *KV) Update(ctx context.Context, fn func(index.Txn) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	u := &update{ctx, fn, make(chan *txn), make(chan verdict), make(chan error, 1), make(chan struct{})}
	if err := kv.enqueue(u); err != nil {
		return err
	}
	return u.wait()
}

func (kv *KV) enqueue(u *update) error {
	kv.mu.Lock()
	defer kv.mu.Unlock()
	if kv.closed {
		return kv.named("write", fs.ErrClosed)
	}
	if kv.broken != nil {
		return kv.broken
	}
	kv.queue = append(kv.queue, u)
	kv.nudge()
	return nil
}

func (kv *KV) nudge() {
	select {
	case kv.wake <- struct{}{}:
	default:
	}
}

// wait serves an update until its outcome is known. One that has run is not given up: it may be in the group that is
// being synced.
func (u *update) wait() error {
	cancelled := u.ctx.Done()
	for {
		select {
		case t := <-u.turn:
			if err := u.take(t); err != nil {
				return err
			}
			cancelled = nil
		case err := <-u.done:
			return err
		case <-cancelled:
			close(u.gone)
			return u.ctx.Err()
		}
	}
}

// take runs the update in the transaction that it was lent.
func (u *update) take(t *txn) error {
	v := verdict{failed: true}
	defer func() {
		v.wrote, v.damage = t.wrote, t.err
		u.ran <- v
	}()
	if err := u.ctx.Err(); err != nil {
		return err
	}
	err := t.run(u.fn)
	v.failed = err != nil
	return err
}

// lend gives an update its turn. ok is false when its caller is gone.
func (u *update) lend(t *txn) (v verdict, ok bool) {
	select {
	case u.turn <- t:
		return <-u.ran, true
	case <-u.gone:
		return v, false
	}
}

// commitGroups is the committer: it takes whatever waits, commits it, and looks again, until the KV is closed.
func (kv *KV) commitGroups() {
	defer close(kv.done)
	for range kv.wake {
		for {
			kv.mu.Lock()
			group, closed := kv.queue, kv.closed
			kv.queue = nil
			kv.mu.Unlock()
			if len(group) == 0 && closed {
				return
			}
			if len(group) == 0 {
				break
			}
			for len(group) > 0 {
				group = kv.commit(group)
			}
		}
	}
}

// commit runs a group in one transaction. It returns those that must run again in another one, because one of the group
// failed when it had written; that one is not among them.
func (kv *KV) commit(group []*update) (again []*update) {
	t, x, err := kv.beginGroup()
	if err != nil {
		finish(group, err)
		return nil
	}
	var in []*update
	for i, u := range group {
		lent := &txn{bucket: x.bucket, path: kv.path}
		v, ok := u.lend(lent)
		switch {
		case !ok:
		case v.damage != nil:
			err := kv.breakDown(v.damage)
			finish(append(in, group[i+1:]...), err)
			return nil
		case !v.failed:
			in = append(in, u)
		case v.wrote:
			if err := guard(t.Rollback); err != nil {
				finish(append(in, group[i+1:]...), kv.breakDown(kv.named("write", err)))
				return nil
			}
			return append(in, group[i+1:]...)
		}
	}
	finish(in, kv.finishGroup(t, len(in) > 0))
	return nil
}

func (kv *KV) beginGroup() (t *bbolt.Tx, x *txn, err error) {
	if t, err = kv.begin(true); err != nil {
		return nil, nil, err
	}
	if x, err = kv.begun(t); err != nil {
		return nil, nil, kv.breakDown(err)
	}
	return t, x, nil
}

func (kv *KV) finishGroup(t *bbolt.Tx, changed bool) error {
	end, panicked := t.Rollback, true
	if changed {
		end = t.Commit
	}
	err := guard(func() error {
		err := end()
		panicked = false
		return err
	})
	if err != nil && panicked {
		return kv.breakDown(kv.named("write", err))
	}
	if err != nil {
		return kv.named("write", err)
	}
	return nil
}

// breakDown stops the KV: bbolt's state after damage is not to be trusted, and may hold its own locks for ever.
func (kv *KV) breakDown(err error) error {
	kv.mu.Lock()
	defer kv.mu.Unlock()
	if kv.broken == nil {
		kv.broken = err
	}
	return kv.broken
}

func finish(updates []*update, err error) {
	for _, u := range updates {
		u.done <- err
	}
}
