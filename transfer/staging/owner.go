package staging

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// ErrBusy: another pull is at work on the same target.
var ErrBusy = errors.New("another pull is at work there")

// ErrLost: another pull took this area over, because this one gave no sign of life for long.
var ErrLost = errors.New("another pull took over")

// mark is the content of the owner file: who is at work, and a count that goes up as long as it lives. No lock of the
// filesystem is used, as network filesystems are known that grant flock to everyone.
type mark struct {
	ID    string `json:"id"`
	PID   int    `json:"pid"`
	Start string `json:"start"` // start time of the process in clock ticks after boot
	Host  string `json:"host"`
	Boot  string `json:"boot"`
	Space string `json:"pid_namespace"`
	Beat  uint64 `json:"beat"`
}

func (m mark) String() string { return fmt.Sprintf("pid %d on %s", m.PID, m.Host) }

// owner is a held owner file. Its beat goes on until stop.
type owner struct {
	path  string
	beat  time.Duration
	stop  context.CancelFunc
	done  chan struct{}
	mu    sync.Mutex // guards the rest
	mark  mark
	last  time.Duration // time since boot of the last sign of life that reached the file
	until time.Duration // how long a sign of life is good for
}

const (
	leaseBeats = 9  // beats for which an owner may go on without having reached its file
	watchBeats = 12 // beats for which another one watches the file before it takes over
)

func self(id, boot string) (mark, error) {
	host, err := os.Hostname()
	if err != nil {
		return mark{}, err
	}
	space, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return mark{}, err
	}
	start, err := startOf(os.Getpid())
	return mark{ID: id, PID: os.Getpid(), Start: start, Host: host, Boot: boot, Space: space}, err
}

// startOf returns the 22nd field of /proc/PID/stat; the second is in parentheses and may hold anything.
func startOf(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	s := string(b)
	f := strings.Fields(s[strings.LastIndexByte(s, ')')+1:])
	if len(f) < 20 {
		return "", fmt.Errorf("/proc/%d/stat: %d fields", pid, len(f))
	}
	return f[19], nil
}

// claim makes the owner file, and takes it over from an owner that is gone.
func claim(ctx context.Context, path string, me mark, o Options) (*owner, error) {
	for {
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		err := create(path, me)
		if err == nil {
			return start(path, me, o.Beat), nil
		}
		if !errors.Is(err, fs.ErrExist) {
			return nil, err
		}
		old, err := read(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = gone(ctx, path, old, me, o)
		}
		if err == nil {
			err = depose(path, old, me)
		}
		if err != nil {
			return nil, err
		}
		o.notify("took over from " + old.String() + ", which is gone")
	}
}

func create(path string, me mark) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	if _, err = f.Write(me.encode()); err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		err = errors.Join(err, os.Remove(path))
	}
	return err
}

// encode has one length for one owner, whatever the beat, so that the file can be written in place.
func (m mark) encode() []byte {
	b, _ := json.Marshal(m) // strings and numbers only
	return append(b, strings.Repeat(" ", max(0, 1023-len(b)))+"\n"...)
}

// read returns the zero mark for a file that is empty or cut short: its owner has only just begun, or died so.
func read(path string) (m mark, err error) {
	b, err := readFile(path)
	if err == nil && json.Unmarshal(b, &m) != nil {
		m = mark{}
	}
	return m, err
}

// gone returns nil if the owner old is dead, and ErrBusy if it lives. A process of this machine is looked up; any other
// is watched for a sign of life, so that no clocks of two machines are compared.
func gone(ctx context.Context, path string, old, me mark, o Options) error {
	if old.Boot == me.Boot && old.Space == me.Space {
		if start, err := startOf(old.PID); err == nil && start == old.Start {
			return fmt.Errorf("%w: %s", ErrBusy, old)
		}
		return nil
	}
	tick := time.NewTicker(o.Beat)
	defer tick.Stop()
	for range watchBeats {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		now, err := read(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		if now != old {
			return fmt.Errorf("%w: %s", ErrBusy, now)
		}
	}
	return nil
}

// depose moves the owner file of old away. If it turns out that a third one was quicker, its file is put back.
func depose(path string, old, me mark) error {
	aside := path + "-" + me.ID
	if err := os.Rename(path, aside); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	now, err := read(aside)
	if err == nil && now.ID != old.ID {
		return errors.Join(fmt.Errorf("%w: %s", ErrBusy, now), os.Link(aside, path), os.Remove(aside))
	}
	return errors.Join(err, os.Remove(aside))
}

func start(path string, me mark, beat time.Duration) *owner {
	ctx, stop := context.WithCancel(context.Background())
	o := &owner{path: path, beat: beat, stop: stop, done: make(chan struct{}), mark: me, last: sinceBoot(),
		until: leaseBeats * beat}
	go o.live(ctx)
	return o
}

func (o *owner) live(ctx context.Context) {
	defer close(o.done)
	tick := time.NewTicker(o.beat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			o.renew() // an owner that can't reach its file finds out in held
		}
	}
}

// renew writes a sign of life, unless the file is no longer this owner's.
func (o *owner) renew() error {
	o.mu.Lock()
	defer o.mu.Unlock()
	f, err := durable.OpenRegular(o.path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return ErrLost
	}
	if err != nil {
		return err
	}
	defer f.Close()
	var now mark
	if err := json.NewDecoder(f).Decode(&now); err != nil || now.ID != o.mark.ID {
		return ErrLost
	}
	o.mark.Beat++
	if _, err := f.WriteAt(o.mark.encode(), 0); err != nil {
		return err
	}
	o.last = sinceBoot()
	return nil
}

// held returns nil as long as this owner may change the area. It is cheap, except after a long pause.
func (o *owner) held() error {
	o.mu.Lock()
	fresh := sinceBoot()-o.last < o.until
	o.mu.Unlock()
	if fresh {
		return nil
	}
	return o.renew()
}

// release ends the beat and gives the area free, if it is still this owner's.
func (o *owner) release() error {
	o.stop()
	<-o.done
	if err := o.renew(); err != nil {
		return err
	}
	return os.Remove(o.path)
}

// sinceBoot goes on while the machine sleeps, unlike the clock inside time.Time.
func sinceBoot() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(fmt.Sprintf("read the boot clock: %v", err)) // since Linux 2.6.39
	}
	return time.Duration(ts.Nano())
}

// others returns the folders in dir whose names begin with prefix, apart from mine.
func others(dir, prefix, mine string) (found []string, err error) {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), prefix) && e.Name() != mine && e.IsDir() {
			found = append(found, filepath.Join(dir, e.Name()))
		}
	}
	return found, err
}
