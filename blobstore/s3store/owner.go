package s3store

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/s3store/bucket"
)

const ownerName = "owner.json"

// OwnerTTL is how long the owner of a store may be silent before another process may take it. It says that it is alive
// three times as often.
const OwnerTTL = 30 * time.Second

// claim is what owner.json says. How old it is, is told by the server's clock alone.
type claim struct {
	Process  string `json:"process"` // the owner; empty: the store was given back
	Host     string `json:"host"`
	PID      int    `json:"pid"`
	PIDSpace string `json:"pid_space"` // where PID means the same process
}

// owner is this process's ownership of a store.
type owner struct {
	st   *Store
	me   claim
	ttl  time.Duration
	stop chan struct{}
	done chan struct{}
	gone chan struct{} // closed when another process has the store
	// inherited: the last owner did not give the store back.
	inherited bool

	mu      sync.Mutex
	etag    string
	renewed time.Time
	lost    error // another process has the store
}

// acquire makes this process the owner. blobstore.ErrInUse.
func (st *Store) acquire(ctx context.Context, ttl time.Duration) (*owner, error) {
	host, _ := os.Hostname() // only for people
	w := &owner{
		st: st, me: claim{rand.Text(), host, os.Getpid(), pidSpace()}, ttl: ttl,
		stop: make(chan struct{}), done: make(chan struct{}), gone: make(chan struct{}),
	}
	for tries := 0; ; tries++ {
		only, err := w.free(ctx)
		if err == nil {
			err = w.put(ctx, w.me, only)
		}
		if err == nil {
			go w.renew()
			return w, nil
		}
		if !errors.Is(err, bucket.ErrConflict) || tries >= bucket.Attempts {
			return nil, err
		}
	}
}

// pidSpace names the run of the kernel and the namespace of process ids.
func pidSpace() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	space, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return ""
	}
	return string(boot[:len(boot)-1]) + " " + space
}

// free returns the condition under which the store may be taken.
func (w *owner) free(ctx context.Context) (bucket.Condition, error) {
	c, o, err := w.read(ctx)
	if errors.Is(err, bucket.ErrAbsent) {
		return bucket.Condition{Absent: true}, nil
	} else if err != nil {
		return bucket.Condition{}, err
	}
	if c.Process == "" || c.Process == w.me.Process {
		return bucket.Condition{ETag: o.ETag}, nil
	} else if o.Age > w.ttl || w.dead(c) {
		w.inherited = true
		return bucket.Condition{ETag: o.ETag}, nil
	}
	return bucket.Condition{}, fmt.Errorf("%w: process %d on %s owns it and was heard of %d seconds ago",
		blobstore.ErrInUse, c.PID, c.Host, int(o.Age.Seconds()))
}

// dead says whether the owner is known to be gone, as its process would be one of this machine's.
func (w *owner) dead(c claim) bool {
	if c.PIDSpace == "" || c.PIDSpace != w.me.PIDSpace || c.PID <= 0 {
		return false
	}
	return c.PID != w.me.PID && (errors.Is(syscall.Kill(c.PID, 0), syscall.ESRCH) || ended(c.PID))
}

// ended says whether a process of this machine is one that has ended and that its parent has not looked at yet.
func ended(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	_, state, _ := strings.Cut(string(stat[strings.LastIndex(string(stat), ")")+1:]), " ")
	return strings.HasPrefix(state, "Z") || strings.HasPrefix(state, "X")
}

func (w *owner) put(ctx context.Context, c claim, only bucket.Condition) error {
	body, err := seal(c)
	if err != nil {
		return err
	}
	began := time.Now()
	etag, err := w.st.putIf(ctx, w.st.b.Key(ownerName), body, only)
	if err != nil {
		return err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.etag, w.renewed = etag, began
	return nil
}

// renew says that the owner is alive, until it is stopped or another process has the store.
func (w *owner) renew() {
	defer close(w.done)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-w.stop:
			cancel()
		case <-ctx.Done():
		}
	}()
	for tick := time.NewTicker(w.ttl / 3); ; {
		select {
		case <-w.stop:
			tick.Stop()
			return
		case <-tick.C:
		}
		err := bucket.ErrConflict
		if w.st.conditional {
			err = w.put(ctx, w.me, bucket.Condition{ETag: w.held()})
		}
		if errors.Is(err, bucket.ErrConflict) {
			err = w.retake(ctx)
		}
		if errors.Is(err, blobstore.ErrInUse) {
			return
		}
	}
}

// retake is put after a conflict, which may come of this process's own try of which the answer was lost.
func (w *owner) retake(ctx context.Context) error {
	etag, err := w.verify(ctx)
	if err != nil {
		return err
	}
	return w.put(ctx, w.me, bucket.Condition{ETag: etag})
}

// verify asks the server whether this process still owns the store, and returns the claim's ETag. blobstore.ErrInUse: a
// store that another process had meanwhile is lost, also if it is free again, as it may have changed.
func (w *owner) verify(ctx context.Context) (etag string, err error) {
	c, o, err := w.read(ctx)
	if err != nil {
		return "", err
	}
	if c.Process == w.me.Process {
		return o.ETag, nil
	}
	by := "it was given back by another process"
	if c.Process != "" {
		by = fmt.Sprintf("process %d on %s took it", c.PID, c.Host)
	}
	err = fmt.Errorf("%w: %s", blobstore.ErrInUse, by)
	w.mu.Lock()
	known := w.lost != nil
	w.lost = err
	w.mu.Unlock()
	if !known {
		close(w.gone)
		w.st.notify(fmt.Sprintf("%s was taken by another process: nothing more is written to it", w.st.b.Config))
	}
	return "", err
}

func (w *owner) read(ctx context.Context) (c claim, o bucket.Object, err error) {
	o, err = w.st.b.Get(ctx, w.st.b.Key(ownerName), smallObject, func(body []byte) error {
		if c = (claim{}); unseal(body, &c) != nil {
			return fmt.Errorf("%w: %s is not what this program writes", blobstore.ErrDamaged, ownerName)
		}
		return nil
	})
	return c, o, err
}

func (w *owner) held() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.etag
}

// check is asked before every change. blobstore.ErrInUse once another process has the store, blobstore.ErrUnavailable
// while this one can't say that it is alive, so that another one may have it.
func (w *owner) check() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.lost != nil {
		return w.lost
	}
	// The clock that time.Since reads may stand still while the machine sleeps.
	if silent := max(time.Since(w.renewed), time.Since(w.renewed.Round(0))); silent > w.ttl {
		return fmt.Errorf("%w: %s could not be told for %d seconds that its owner is alive",
			blobstore.ErrUnavailable, w.st.b.Config, int(silent.Seconds()))
	}
	return nil
}

// release gives the store back.
func (w *owner) release() error {
	close(w.stop)
	<-w.done
	if w.check() != nil {
		return nil
	}
	err := w.put(context.Background(), claim{}, bucket.Condition{ETag: w.held()})
	if errors.Is(err, bucket.ErrConflict) || errors.Is(err, bucket.ErrAbsent) {
		return nil // it is another's by now, or this one's for half a minute more
	}
	return err
}
