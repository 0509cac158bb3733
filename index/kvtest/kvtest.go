// Package kvtest is the conformance suite of index engines: what the contract of index.KV says, asked of one.
package kvtest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/index"
)

// Engine opens engines of one kind. A place is a name of the suite's choosing below a folder of the test's own.
type Engine struct {
	// Open opens what is at the place, which is empty the first time.
	Open func(place string) (index.KV, error)
	// Copy makes a place hold what another one durably holds, also while that is open, as after a crash.
	Copy func(from, to string) error
	// Shared: a place may be open any number of times at once, and updates do not wait for their turn.
	Shared bool
}

// Run runs the suite. Every engine that it opens is closed at the end.
func Run(t *testing.T, e Engine) {
	for _, c := range []struct {
		name string
		test func(*testing.T, index.KV)
	}{
		{"values", values},
		{"order", orderOfKeys},
		{"range is closed early", earlyBreak},
		{"range sees own writes", ownWrites},
		{"view can not write", readOnly},
		{"keys that can not be", badKeys},
		{"values are copied", copied},
		{"failed update", failedUpdate},
		{"panic", panicking},
		{"exit of the goroutine", exiting},
		{"failures among successes", mixed},
		{"serializable", serializable},
		{"view is one state", snapshot},
		{"canceled", canceled},
	} {
		t.Run(c.name, func(t *testing.T) { c.test(t, open(t, e, t.TempDir()+"/kv")) })
	}
	t.Run("durable", func(t *testing.T) { durable(t, e) })
	if e.Shared {
		t.Run("shared", func(t *testing.T) { shared(t, e) })
	} else {
		t.Run("in use", func(t *testing.T) { inUse(t, e) })
		t.Run("dropped", func(t *testing.T) { dropped(t, open(t, e, t.TempDir()+"/kv")) })
	}
	t.Run("closed", func(t *testing.T) { closed(t, e) })
	t.Run("close waits", func(t *testing.T) { closeWaits(t, e) })
}

func open(t *testing.T, e Engine, place string) index.KV {
	t.Helper()
	kv, err := e.Open(place)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := kv.Close(); err != nil {
			t.Error(err)
		}
	})
	return kv
}

func update(t *testing.T, kv index.KV, fn func(index.Txn) error) {
	t.Helper()
	if err := kv.Update(t.Context(), fn); err != nil {
		t.Fatal(err)
	}
}

func put(t *testing.T, kv index.KV, keys ...string) {
	t.Helper()
	update(t, kv, func(x index.Txn) error {
		for _, k := range keys {
			if err := x.Put([]byte(k), []byte("value of "+k)); err != nil {
				return err
			}
		}
		return nil
	})
}

// keys returns the keys of a range and checks their values.
func keys(t *testing.T, kv index.KV, from, to string) (found []string) {
	t.Helper()
	err := kv.View(t.Context(), func(x index.Txn) error {
		found = nil
		var end []byte
		if to != "" {
			end = []byte(to)
		}
		for k, v := range x.Range([]byte(from), end) {
			if string(v) != "value of "+string(k) {
				t.Errorf("key %q has value %q", k, v)
			}
			found = append(found, string(k))
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func same(t *testing.T, what string, got, want []string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("%s: %q, want %q", what, got, want)
	}
}

func values(t *testing.T, kv index.KV) {
	big := bytes.Repeat([]byte("manifest"), 5<<17)
	check := func(x index.Txn) error {
		for _, c := range []struct{ key, value []byte }{
			{[]byte("empty"), []byte{}}, {[]byte("nil"), []byte{}}, {[]byte("absent"), nil},
			{[]byte("big"), big}, {[]byte{0}, []byte{0}},
		} {
			v, err := x.Get(c.key)
			if err != nil {
				return err
			}
			if !bytes.Equal(v, c.value) || (v == nil) != (c.value == nil) {
				t.Errorf("%q has %d bytes, nil %v; want %d, nil %v", c.key, len(v), v == nil, len(c.value), c.value == nil)
			}
		}
		return nil
	}
	update(t, kv, func(x index.Txn) error {
		err := errors.Join(x.Put([]byte("empty"), []byte{}), x.Put([]byte("nil"), nil), x.Put([]byte("absent"), []byte("x")),
			x.Put([]byte("big"), []byte("small")), x.Put([]byte("big"), big), x.Put([]byte{0}, []byte{0}),
			x.Delete([]byte("absent")), x.Delete([]byte("never there")))
		if err != nil {
			return err
		}
		return check(x)
	})
	if err := kv.View(t.Context(), check); err != nil {
		t.Fatal(err)
	}
}

func orderOfKeys(t *testing.T, kv index.KV) {
	same(t, "nothing", keys(t, kv, "", ""), nil)
	want := []string{"\x00", "\x00\x00", "\x00\xff", "a", "a\x00",
		"a\x00b", "a\x01", "aa", "b", "\xff", "\xff\x00", "\xff\xff"}
	mixed := slices.Clone(want)
	slices.Reverse(mixed)
	put(t, kv, mixed...)
	same(t, "all", keys(t, kv, "", ""), want)
	same(t, "from a key that is there", keys(t, kv, "a", "b"), want[3:8])
	same(t, "from a key that is not", keys(t, kv, "a\x00a", "ab"), want[5:8])
	same(t, "to the end", keys(t, kv, "\xff", ""), want[9:])
	same(t, "empty range", keys(t, kv, "b", "b"), nil)
	same(t, "reversed range", keys(t, kv, "b", "a"), nil)
	same(t, "behind all", keys(t, kv, "\xff\xff\x00", ""), nil)
}

func earlyBreak(t *testing.T, kv index.KV) {
	var names []string
	for i := range 3000 {
		names = append(names, fmt.Sprintf("%08d", i))
	}
	put(t, kv, names...)
	same(t, "all", keys(t, kv, "", ""), names)
	update(t, kv, func(x index.Txn) error {
		for k := range x.Range([]byte("00001000"), nil) {
			if string(k) != "00001000" {
				t.Errorf("first of the range is %q", k)
			}
			break
		}
		for k := range x.Range([]byte("00002999"), nil) {
			if string(k) != "00002999" {
				t.Errorf("last key is %q", k)
			}
		}
		return x.Delete([]byte("00001000"))
	})
	same(t, "behind the deleted one", keys(t, kv, "00001000", "00001002"), names[1001:1002])
}

func ownWrites(t *testing.T, kv index.KV) {
	put(t, kv, "a", "c")
	update(t, kv, func(x index.Txn) error {
		err := errors.Join(x.Put([]byte("b"), []byte("value of b")), x.Delete([]byte("c")),
			x.Put([]byte("d"), []byte("value of d")))
		var found []string
		for k := range x.Range(nil, nil) {
			found = append(found, string(k))
		}
		same(t, "inside", found, []string{"a", "b", "d"})
		return err
	})
	same(t, "after", keys(t, kv, "", ""), []string{"a", "b", "d"})
}

func readOnly(t *testing.T, kv index.KV) {
	put(t, kv, "a")
	err := kv.View(t.Context(), func(x index.Txn) error {
		if x.Put([]byte("b"), nil) == nil || x.Delete([]byte("a")) == nil {
			t.Error("a view wrote")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	same(t, "after", keys(t, kv, "", ""), []string{"a"})
}

func badKeys(t *testing.T, kv index.KV) {
	longest := make([]byte, index.MaxKeyBytes) // that nothing makes shorter
	rand.NewChaCha8([32]byte{}).Read(longest)
	update(t, kv, func(x index.Txn) error {
		if x.Put(nil, nil) == nil {
			t.Error("an empty key was taken")
		}
		if x.Put(make([]byte, 32769), nil) == nil {
			t.Error("a key of 32769 bytes was taken")
		}
		return x.Put(longest, []byte("value of "+string(longest)))
	})
	same(t, "after", keys(t, kv, "", ""), []string{string(longest)})
}

func copied(t *testing.T, kv index.KV) {
	update(t, kv, func(x index.Txn) error {
		k, v := []byte("key"), []byte("value of key")
		err := x.Put(k, v)
		clear(k)
		clear(v)
		return err
	})
	same(t, "after", keys(t, kv, "", ""), []string{"key"})
}

var errOwn = errors.New("the function's own error")

func failedUpdate(t *testing.T, kv index.KV) {
	put(t, kv, "a")
	err := kv.Update(t.Context(), func(x index.Txn) error {
		return errors.Join(x.Put([]byte("b"), nil), x.Delete([]byte("a")), errOwn)
	})
	if !errors.Is(err, errOwn) {
		t.Errorf("update returned %v", err)
	}
	if err := kv.View(t.Context(), func(index.Txn) error { return errOwn }); !errors.Is(err, errOwn) {
		t.Errorf("view returned %v", err)
	}
	same(t, "after", keys(t, kv, "", ""), []string{"a"})
}

func panicking(t *testing.T, kv index.KV) {
	put(t, kv, "a")
	for _, call := range []func(context.Context, func(index.Txn) error) error{kv.Update, kv.View} {
		func() {
			defer func() {
				if r := recover(); r != errOwn {
					t.Errorf("recovered %v", r)
				}
			}()
			call(t.Context(), func(x index.Txn) error {
				x.Put([]byte("b"), nil)
				panic(errOwn)
			})
			t.Error("the panic was swallowed")
		}()
	}
	put(t, kv, "c")
	same(t, "after", keys(t, kv, "", ""), []string{"a", "c"})
}

// exiting is what a failing test does inside a function.
func exiting(t *testing.T, kv index.KV) {
	for _, call := range []func(context.Context, func(index.Txn) error) error{kv.Update, kv.View} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			call(t.Context(), func(x index.Txn) error {
				x.Put([]byte("b"), nil)
				runtime.Goexit()
				return nil
			})
		}()
		<-done
	}
	put(t, kv, "c")
	same(t, "after", keys(t, kv, "", ""), []string{"c"})
}

// mixed runs updates at once of which every third fails and every seventh panics after it wrote.
func mixed(t *testing.T, kv index.KV) {
	const n = 100
	var want []string
	var wg sync.WaitGroup
	for i := range n {
		name := fmt.Sprintf("%03d", i)
		if i%3 != 0 && i%7 != 0 {
			want = append(want, name)
		}
		wg.Go(func() {
			defer func() {
				if r := recover(); (r != nil) != (i%7 == 0) {
					t.Errorf("%d: recovered %v", i, r)
				}
			}()
			err := kv.Update(t.Context(), func(x index.Txn) error {
				err := x.Put([]byte(name), []byte("value of "+name))
				if i%7 == 0 {
					panic(i)
				}
				if i%3 == 0 {
					return errOwn
				}
				return err
			})
			if (err != nil) != (i%3 == 0) {
				t.Errorf("%d: %v", i, err)
			}
		})
	}
	wg.Wait()
	same(t, "after", keys(t, kv, "", ""), want)
}

// serializable counts in many goroutines at once.
func serializable(t *testing.T, kv index.KV) { count(t, kv) }

// shared counts through two engines on one place.
func shared(t *testing.T, e Engine) {
	place := t.TempDir() + "/kv"
	count(t, open(t, e, place), open(t, e, place))
}

func count(t *testing.T, kvs ...index.KV) {
	const workers, rounds = 16, 10
	counter := []byte("counter")
	var wg sync.WaitGroup
	for i := range workers {
		wg.Go(func() {
			for range rounds {
				err := kvs[i%len(kvs)].Update(t.Context(), func(x index.Txn) error {
					v, err := x.Get(counter)
					if err != nil {
						return err
					}
					n := uint64(0)
					if v != nil {
						n = binary.BigEndian.Uint64(v)
					}
					return x.Put(counter, binary.BigEndian.AppendUint64(nil, n+1))
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	err := kvs[0].View(t.Context(), func(x index.Txn) error {
		v, err := x.Get(counter)
		if err == nil && binary.BigEndian.Uint64(v) != workers*rounds {
			t.Errorf("counted to %d, want %d", binary.BigEndian.Uint64(v), workers*rounds)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// snapshot keeps a view open while pairs of keys are written together.
func snapshot(t *testing.T, kv index.KV) {
	put(t, kv, "a")
	err := kv.View(t.Context(), func(x index.Txn) error {
		if _, err := x.Get([]byte("c")); err != nil { // from here on it is one state
			return err
		}
		written := make(chan error)
		go func() {
			written <- kv.Update(t.Context(), func(x index.Txn) error {
				return errors.Join(x.Put([]byte("b"), nil), x.Delete([]byte("a")))
			})
		}()
		if err := <-written; err != nil {
			return err
		}
		a, errA := x.Get([]byte("a"))
		b, errB := x.Get([]byte("b"))
		if a == nil || b != nil {
			t.Errorf("the view changed under its reader: a %q, b %q", a, b)
		}
		return errors.Join(errA, errB)
	})
	if err != nil {
		t.Fatal(err)
	}
}

func canceled(t *testing.T, kv index.KV) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	fn := func(index.Txn) error {
		t.Error("ran with a context that is done")
		return nil
	}
	if err := kv.Update(ctx, fn); !errors.Is(err, context.Canceled) {
		t.Errorf("update returned %v", err)
	}
	if err := kv.View(ctx, fn); !errors.Is(err, context.Canceled) {
		t.Errorf("view returned %v", err)
	}
	late, end := context.WithCancel(t.Context())
	err := kv.Update(late, func(x index.Txn) error {
		end()
		return x.Put([]byte("b"), []byte("value of b"))
	})
	if err != nil {
		t.Errorf("an update that ran before its context ended returned %v", err)
	}
	same(t, "after", keys(t, kv, "", ""), []string{"b"})
}

// dropped gives up an update that waits for its turn.
func dropped(t *testing.T, kv index.KV) {
	var wg sync.WaitGroup
	queued, give := context.WithCancel(t.Context())
	err := kv.Update(t.Context(), func(x index.Txn) error {
		wg.Go(func() {
			err := kv.Update(queued, func(index.Txn) error {
				t.Error("ran with a context that is done")
				return nil
			})
			if !errors.Is(err, context.Canceled) {
				t.Errorf("an update that waited returned %v", err)
			}
		})
		give()
		return x.Put([]byte("a"), []byte("value of a"))
	})
	if err != nil {
		t.Error(err)
	}
	wg.Wait()
	same(t, "after", keys(t, kv, "", ""), []string{"a"})
}

func durable(t *testing.T, e Engine) {
	dir := t.TempDir()
	kv, err := e.Open(dir + "/kv")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for i := range 20 {
		name := fmt.Sprintf("%02d", i)
		put(t, kv, name)
		want = append(want, name)
		place := fmt.Sprintf("%s/crashed-%d", dir, i)
		if err := e.Copy(dir+"/kv", place); err != nil {
			t.Fatal(err)
		}
		same(t, "after a crash", keys(t, open(t, e, place), "", ""), want)
	}
	if err := kv.Close(); err != nil {
		t.Fatal(err)
	}
	same(t, "opened again", keys(t, open(t, e, dir+"/kv"), "", ""), want)
}

func inUse(t *testing.T, e Engine) {
	place := t.TempDir() + "/kv"
	kv, err := e.Open(place)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := e.Open(place); !errors.Is(err, index.ErrInUse) {
		t.Errorf("the second open returned %v", err)
	}
	if err := kv.Close(); err != nil {
		t.Fatal(err)
	}
	put(t, open(t, e, place), "a")
}

func closed(t *testing.T, e Engine) {
	kv, err := e.Open(t.TempDir() + "/kv")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := kv.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	}
	nothing := func(index.Txn) error { return nil }
	if err := kv.Update(t.Context(), nothing); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("update returned %v", err)
	}
	if err := kv.View(t.Context(), nothing); !errors.Is(err, fs.ErrClosed) {
		t.Errorf("view returned %v", err)
	}
}

// closeWaits closes while updates run: each is kept or refused.
func closeWaits(t *testing.T, e Engine) {
	place := t.TempDir() + "/kv"
	kv, err := e.Open(place)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var want []string
	var wg sync.WaitGroup
	running := make(chan struct{}, 64)
	for i := range 32 {
		name := fmt.Sprintf("%02d", i)
		wg.Go(func() {
			running <- struct{}{}
			err := kv.Update(context.Background(), func(x index.Txn) error {
				return x.Put([]byte(name), []byte("value of "+name))
			})
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				want = append(want, name)
			} else if !errors.Is(err, fs.ErrClosed) {
				t.Error(err)
			}
		})
	}
	<-running
	if err := kv.Close(); err != nil {
		t.Error(err)
	}
	wg.Wait()
	slices.Sort(want)
	same(t, "after", keys(t, open(t, e, place), "", ""), want)
}
