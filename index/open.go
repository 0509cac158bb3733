package index

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"sync"
)

// seqBlock is how many sequence numbers of a repository are made durable at once. What is left of a block when the
// process ends is never issued. Numbers ascend only over the callers of one Index: an engine shared by several
// processes needs blocks of one.
const seqBlock = 64

// Index answers what a registry holds. There is one implementation, over any KV. Any number of goroutines may use one.
// What it returns is the caller's to keep and change.
type Index struct {
	kv       KV
	limits   limits
	renewed  int
	mu       sync.Mutex // guards counters
	counters map[string]*counter
}

// counter issues the sequence numbers of one repository.
type counter struct {
	mu    sync.Mutex
	next  uint64 // to be issued, if it is within limit
	limit uint64 // the last number that was made durable
	seen  uint64 // the highest number that an op carried
}

// New opens the index in kv, and makes an empty one if kv is empty. It finishes a Reset that was interrupted, and resets
// an index of an earlier format; see Renewed. Closing the Index closes kv; after an error kv is still open. ErrDamaged,
// ErrFormat.
func New(ctx context.Context, kv KV) (*Index, error) {
	ix := &Index{kv: kv, limits: limits{rows: 256, bytes: 1 << 20, steps: 4096}, counters: make(map[string]*counter)}
	resetting := false
	err := kv.View(ctx, func(x Txn) (err error) {
		resetting, err = tx{x}.has(stateKey(stateReset))
		return err
	})
	if err == nil && resetting {
		err = ix.drop(ctx)
	}
	if err == nil {
		err = ix.renew(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("open index: %w", err)
	}
	return ix, nil
}

// Renewed returns the number of the earlier format in which New found the index, which is empty then and to be rebuilt
// from the store; 0 if it was of this program's format, or new.
func (ix *Index) Renewed() (format int) { return ix.renewed }

// renew brings the KV to this program's key layout.
func (ix *Index) renew(ctx context.Context) error {
	was, err := ix.format(ctx)
	if err != nil || was == formatVersion {
		return err
	}
	ix.renewed = int(was)
	return ix.Reset(ctx)
}

// format returns the version of the key layout, and writes it into an empty KV. ErrFormat if it is a later one.
func (ix *Index) format(ctx context.Context) (version byte, err error) {
	err = ix.kv.View(ctx, func(x Txn) error {
		t := tx{x}
		b, err := t.load(stateKey(stateFormat))
		switch {
		case err != nil:
			return err
		case b == nil:
			return t.onlySequences()
		case len(b) != 1 || b[0] == 0 || b[0] > formatVersion:
			return fmt.Errorf("%w: it has format %x, this program knows %d", ErrFormat, b, formatVersion)
		}
		version = b[0]
		return nil
	})
	if err != nil || version != 0 {
		return version, err
	}
	return formatVersion, ix.kv.Update(ctx, func(x Txn) error {
		return tx{x}.store(stateKey(stateFormat), []byte{formatVersion})
	})
}

func (t tx) onlySequences() error {
	return t.walk([]byte{}, nil, func(k, _ []byte) ([]byte, error) {
		if k[0] == tableSequence {
			return after([]byte{tableSequence}), nil
		}
		return nil, fmt.Errorf("%w: rows without a format", ErrDamaged)
	})
}

// Close closes the KV. It waits for the changes that were accepted.
func (ix *Index) Close() error { return ix.kv.Close() }

// Reset drops everything but the sequence counters, so that the index can be rebuilt from refs. Nobody may use the
// index meanwhile. If it is interrupted, the next New finishes it.
func (ix *Index) Reset(ctx context.Context) error {
	err := ix.kv.Update(ctx, func(x Txn) error { return tx{x}.store(stateKey(stateReset), nil) })
	if err == nil {
		err = ix.drop(ctx)
	}
	if err == nil {
		_, err = ix.format(ctx)
	}
	if err != nil {
		return fmt.Errorf("reset index: %w", err)
	}
	return nil
}

// drop deletes all rows but the sequences, some thousands at a time. Reset's mark has the last key of all and so goes
// last.
func (ix *Index) drop(ctx context.Context) error {
	for more := true; more; {
		err := ix.kv.Update(ctx, func(x Txn) error {
			var keys [][]byte
			t := tx{x}
			err := t.walk([]byte{}, nil, func(k, _ []byte) ([]byte, error) {
				if k[0] == tableSequence {
					return after([]byte{tableSequence}), nil
				}
				if len(keys) == ix.limits.steps {
					return nil, errStop
				}
				keys = append(keys, bytes.Clone(k))
				return nil, nil
			})
			more = len(keys) == ix.limits.steps
			return cmp.Or(err, t.deleteAll(keys))
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// NextSeq issues the next sequence number of a repository: higher than every number that it issued before, in this or
// an earlier process, and than every number that an applied op carried. Numbers start at 1 and have gaps.
func (ix *Index) NextSeq(ctx context.Context, repo string) (uint64, error) {
	if err := checkText("repository", repo); err != nil {
		return 0, err
	}
	c := ix.counter(repo)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next <= c.seen {
		c.next = c.seen + 1
	}
	if c.next > c.limit {
		if err := c.reserve(ctx, ix.kv, repo); err != nil {
			return 0, fmt.Errorf("number a change of %s: %w", repo, err)
		}
	}
	c.next++
	return c.next - 1, nil
}

// reserve makes a block of numbers durable, all above what was made durable before.
func (c *counter) reserve(ctx context.Context, kv KV, repo string) error {
	var last uint64
	err := kv.Update(ctx, func(x Txn) error {
		t := tx{x}
		n, err := t.number(sequenceKey(repo))
		if err != nil {
			return err
		}
		last = max(n, c.seen)
		return t.store(sequenceKey(repo), encodeNumber(last+seqBlock))
	})
	if err == nil {
		c.next, c.limit = last+1, last+seqBlock
	}
	return err
}

func (ix *Index) counter(repo string) *counter {
	ix.mu.Lock()
	defer ix.mu.Unlock()
	c := ix.counters[repo]
	if c == nil {
		c = new(counter)
		ix.counters[repo] = c
	}
	return c
}

// saw keeps NextSeq above a number that an op carries.
func (ix *Index) saw(repo string, seq uint64) {
	c := ix.counter(repo)
	c.mu.Lock()
	c.seen = max(c.seen, seq)
	c.mu.Unlock()
}

// Checkpoint returns the highest position that a Checkpoint op carried; 0 if there was none.
func (ix *Index) Checkpoint(ctx context.Context) (position uint64, err error) {
	err = ix.view(ctx, func(t tx) (err error) {
		position, err = t.number(stateKey(stateCheckpoint))
		return err
	})
	return position, err
}

// Note returns what a Note op keeps under a name; nil: nothing.
func (ix *Index) Note(ctx context.Context, name string) (value []byte, err error) {
	err = ix.view(ctx, func(t tx) error {
		b, err := t.load(stateKey(stateNote + name))
		value = bytes.Clone(b)
		return err
	})
	return value, err
}
