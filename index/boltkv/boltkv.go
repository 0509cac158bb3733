// Package boltkv is the embedded index engine: one bbolt file of one bucket.
//
// Updates are committed in groups: while one group is being synced the next one gathers, so that concurrent updates
// share a sync and a lone one waits for nobody.
package boltkv

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"

	"github.com/kiln-registry/kiln-registry/index"
)

// DefaultTimeout is how long Open waits for another process to let go of the file.
const DefaultTimeout = 1500 * time.Millisecond

// initialMap is how much address space is mapped from the start at least, in bytes; memory is used for what is read
// only. Mapping anew, when the file outgrows it, waits for the views that are open.
const initialMap = 256 << 20

// growBy is how much the file grows at a time, in bytes: each time costs a sync of its own.
const growBy = 2 << 20

var bucketName = []byte("kiln")

// Options are settings of Open. The zero Options are the defaults.
type Options struct {
	Timeout time.Duration // how long to wait for another process to let go of the file; 0: DefaultTimeout
	// CheckLater is the size in bytes from which a file is checked while it is used: Open returns before it has read it
	// through, and whoever opened it has to look at Checked. 0: Open checks every file itself.
	CheckLater int64
}

// KV is an index engine on a file. Any number of goroutines may use one; one process at a time has the file.
type KV struct {
	path string
	file *os.File // bbolt's own
	db   *bbolt.DB

	beginning sync.Mutex // held while a transaction begins

	mu     sync.Mutex // guards what follows
	queue  []*update
	closed bool
	broken error // set once bbolt failed in a way that it does not recover from: it is not called again

	checked   chan struct{}      // closed when the check of the file has ended
	checkErr  error              // how it ended; to be read when checked is closed
	stopCheck context.CancelFunc // lets the check give up

	wake      chan struct{} // holds a token while the committer has something to look at
	done      chan struct{} // closed when the committer has ended
	closeOnce sync.Once
	closeErr  error
}

var _ index.KV = (*KV)(nil)

// Open opens the file, and makes it if it is absent. It reads the whole file once and checks that it is sound, which
// takes about 0.6 s per GB in the page cache; with CheckLater it leaves that for later. ErrInUse while another process
// has it, ErrDamaged; both name the file.
func Open(path string, o Options) (*KV, error) {
	if o.Timeout == 0 {
		o.Timeout = DefaultTimeout
	}
	kv := &KV{path: path, wake: make(chan struct{}, 1), done: make(chan struct{}), checked: make(chan struct{})}
	if err := kv.open(o); err != nil {
		kv.abandon() // bbolt may hold locks, so that it can't be closed
		return nil, kv.named("open", err)
	}
	go kv.commitGroups()
	return kv, nil
}

func (kv *KV) open(o Options) error {
	fresh, size := false, int64(0)
	if info, err := os.Stat(kv.path); err == nil {
		size = info.Size()
	} else {
		fresh = errors.Is(err, fs.ErrNotExist)
	}
	err := guard(func() (err error) {
		kv.db, err = bbolt.Open(kv.path, 0o600, &bbolt.Options{
			Timeout:         o.Timeout,
			InitialMmapSize: max(initialMap, 2*int(size)),
			FreelistType:    bbolt.FreelistMapType,
			NoStatistics:    true,
			OpenFile: func(name string, flag int, mode os.FileMode) (*os.File, error) {
				f, err := os.OpenFile(name, flag, mode)
				kv.file = f
				return f, err
			},
		})
		return opening(err)
	})
	if err != nil {
		return err
	}
	kv.db.AllocSize = growBy
	later := o.CheckLater > 0 && size >= o.CheckLater
	if !later {
		if err := kv.checkNow(); err != nil {
			guard(kv.db.Close)
			return err
		}
	}
	if err := kv.makeBucket(); err != nil {
		return err
	}
	if fresh {
		if err := syncDir(filepath.Dir(kv.path)); err != nil {
			return err
		}
	}
	if later {
		return kv.checkLater()
	}
	return nil
}

func (kv *KV) checkNow() error {
	s, err := takeSnapshot(kv.file)
	if err == nil {
		err = s.check(context.Background(), kv.file)
	}
	kv.stopCheck = func() {}
	close(kv.checked)
	return err
}

// checkLater begins to check the file as it is now, while it is used. Nobody has written yet, so that the transaction
// which it keeps open is of the same state.
func (kv *KV) checkLater() error {
	s, err := takeSnapshot(kv.file)
	if err != nil {
		return err
	}
	t, err := kv.begin(false)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	kv.stopCheck = cancel
	go func() {
		defer close(kv.checked)
		err := s.check(ctx, kv.file)
		kv.endView(t)
		switch {
		case ctx.Err() != nil:
			kv.checkErr = kv.named("check", fs.ErrClosed)
		case err != nil:
			kv.checkErr = kv.breakDown(kv.named("check", err))
		}
	}()
	return nil
}

// Checked waits until the check has ended that Open began or has made. It returns nil if the file was sound, and what
// Open would have returned if it was not: every other call returns that error, too, from then on. After a Close that
// came before its end it is fs.ErrClosed.
func (kv *KV) Checked(ctx context.Context) error {
	select {
	case <-kv.checked:
		return kv.checkErr
	case <-ctx.Done():
		return ctx.Err()
	}
}

// opening says what an error of bbolt.Open means: what is neither the system's nor about the lock is about the content.
func opening(err error) error {
	var system syscall.Errno
	switch {
	case err == nil || errors.As(err, &system):
		return err
	case errors.Is(err, bbolterrors.ErrTimeout):
		return index.ErrInUse
	}
	return fmt.Errorf("%w: %v", index.ErrDamaged, err)
}

func (kv *KV) makeBucket() error {
	return guard(func() error {
		found := false
		err := kv.db.View(func(t *bbolt.Tx) error {
			found = t.Bucket(bucketName) != nil
			return nil
		})
		if err != nil || found {
			return err
		}
		return kv.db.Update(func(t *bbolt.Tx) error {
			_, err := t.CreateBucket(bucketName)
			return err
		})
	})
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// Path returns the path that Open was given.
func (kv *KV) Path() string { return kv.path }

// View implements index.KV.
func (kv *KV) View(ctx context.Context, fn func(index.Txn) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	t, err := kv.begin(false)
	if err != nil {
		return err
	}
	defer kv.endView(t)
	x, err := kv.begun(t)
	if err != nil {
		return err
	}
	return x.run(fn)
}

// begin starts a bbolt transaction. If bbolt panics in it, as it does when the meta pages are spoilt, it keeps a lock
// that every later call waits for: so there must be none.
func (kv *KV) begin(writable bool) (t *bbolt.Tx, err error) {
	kv.beginning.Lock()
	defer kv.beginning.Unlock()
	if err := kv.isBroken(); err != nil {
		return nil, err
	}
	err = guard(func() (err error) {
		t, err = kv.db.Begin(writable)
		return err
	})
	if errors.Is(err, index.ErrDamaged) {
		return nil, kv.breakDown(kv.named("use", err))
	}
	if err != nil {
		return nil, kv.named("use", err)
	}
	return t, nil
}

func (kv *KV) endView(t *bbolt.Tx) {
	if kv.isBroken() == nil {
		guard(t.Rollback)
	}
}

func (kv *KV) isBroken() error {
	kv.mu.Lock()
	defer kv.mu.Unlock()
	return kv.broken
}

// named says which file an error of the engine is about, unless the error does.
func (kv *KV) named(doing string, err error) error {
	if of := (*fs.PathError)(nil); errors.As(err, &of) && of.Path == kv.path {
		return err
	}
	if errors.Is(err, bbolterrors.ErrDatabaseNotOpen) {
		err = fs.ErrClosed
	}
	return fmt.Errorf("%s %s: %w", doing, kv.path, err)
}

// Close implements index.KV.
func (kv *KV) Close() error {
	kv.closeOnce.Do(func() {
		kv.mu.Lock()
		kv.closed = true
		kv.mu.Unlock()
		kv.nudge()
		kv.stopCheck()
		<-kv.checked // a commit may wait for its transaction
		<-kv.done
		if kv.isBroken() != nil {
			kv.abandon()
			return
		}
		if err := guard(kv.db.Close); err != nil {
			kv.closeErr = kv.named("close", err)
		}
	})
	return kv.closeErr
}

// abandon lets go of the file of a database that can't be closed in an orderly way, so that it can be opened again or
// replaced. What bbolt mapped stays mapped until the process ends.
func (kv *KV) abandon() {
	if kv.file != nil {
		syscall.Flock(int(kv.file.Fd()), syscall.LOCK_UN) // the mapping would keep it
		kv.file.Close()
	}
}
