// Package pgkv is the index engine on PostgreSQL: one table of keys and values, which any number of processes may use
// at once. What Update has acknowledged is on the primary's disk and, where the server has synchronous standbys, on
// those that it waits for.
//
// Updates are SERIALIZABLE transactions. The server ends one of those that would not fit one after another. It then
// runs again, after a short random wait, and from the second try on only one at a time in a process. Where many rows are
// read in an update PostgreSQL takes whole tables for read, so that updates that have nothing to do with each other
// meet: a server for a busy registry has max_pred_locks_per_transaction = 1024 or more.
package pgkv

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kiln-registry/kiln-registry/index"
)

const (
	// conns is how many connections a KV has at most. PostgreSQL takes 100 if nothing else is set.
	conns = 16
	// commitTimeout is how long a commit may take before its outcome is not known.
	commitTimeout = 30 * time.Second
	// tries is how often an update runs that meets others each time: it waits for some 5 s in all.
	tries = 24
	// reconnects is how often an update runs whose connection was lost before it was committed.
	reconnects = 4
	// maxPause bounds the wait before the next try.
	maxPause = 250 * time.Millisecond
)

// Options of a KV. The zero value is good.
type Options struct {
	// Schema is that of the tables, which only this program may use. Empty: kiln.
	Schema string
	// Conns is how many connections there are at most. 0: pool_max_conns of the URL, or else 16.
	Conns int
	// PasswordFile holds the password, and is read anew for every connection. Empty: that of the URL, of PGPASSWORD, or
	// of PGPASSFILE.
	PasswordFile string
	// tune changes what the pool is made with, in tests.
	tune func(*pgxpool.Config)
}

// KV is the engine. Any number of goroutines may use one. It also implements index.Clock.
//
// View and Update return index.ErrUnavailable when no primary answers, and when an update met others too often. If the
// connection is lost while an update is being committed, the error is that, too, and the writes may have been kept. An
// update whose connection was lost earlier has not written anything, and runs again. A View runs its function once.
type KV struct {
	pool   *pgxpool.Pool
	sql    statements
	turn   chan struct{} // held by the update that runs again
	mu     sync.Mutex    // guards closed
	closed bool
	active sync.WaitGroup // transactions
}

// Open connects to the database of a URL, postgres://USER@HOST1,HOST2,HOST3/DATABASE, and brings its tables to what
// this program knows, which any number of processes may do at once. Of several hosts the one is used that takes writes
// (target_session_attrs=read-write), and each has 2 s to answer (connect_timeout=2), unless the URL says otherwise.
// No error shows the password. index.ErrUnavailable, index.ErrFormat.
func Open(ctx context.Context, url string, o Options) (*KV, error) {
	c, err := configure(url, o)
	if err != nil {
		return nil, fmt.Errorf("open index: %w", err)
	}
	if o.tune != nil {
		o.tune(c)
	}
	pool, err := pgxpool.NewWithConfig(ctx, c)
	if err != nil {
		return nil, fmt.Errorf("open index: %w", unavailable(err))
	}
	schema := o.Schema
	if schema == "" {
		schema = "kiln"
	}
	if err := migrate(ctx, pool, schema); err != nil {
		pool.Close()
		return nil, fmt.Errorf("open index: %w", err)
	}
	return &KV{pool: pool, sql: in(schema), turn: make(chan struct{}, 1)}, nil
}

// Close implements index.KV.
func (kv *KV) Close() error {
	kv.mu.Lock()
	kv.closed = true
	kv.mu.Unlock()
	kv.active.Wait()
	kv.pool.Close()
	return nil
}

// enter counts a transaction, which leave ends.
func (kv *KV) enter(ctx context.Context) error {
	kv.mu.Lock()
	defer kv.mu.Unlock()
	if kv.closed {
		return fmt.Errorf("index: %w", fs.ErrClosed)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	kv.active.Add(1)
	return nil
}

// Now implements index.Clock: it is the time of the primary.
func (kv *KV) Now(ctx context.Context) (now time.Time, err error) {
	if err := kv.enter(ctx); err != nil {
		return now, err
	}
	defer kv.active.Done()
	err = kv.pool.QueryRow(ctx, "select clock_timestamp()").Scan(&now)
	if err != nil {
		return now, fmt.Errorf("ask the time of the index: %w", outside(ctx, err))
	}
	return now, nil
}

// View implements index.KV. The state is that at the first read.
func (kv *KV) View(ctx context.Context, fn func(index.Txn) error) error {
	if err := kv.enter(ctx); err != nil {
		return err
	}
	defer kv.active.Done()
	x := &txn{ctx: ctx, kv: kv, begin: beginView}
	defer x.end()
	if err := fn(x); x.err == nil {
		return err
	}
	return fmt.Errorf("read the index: %w", outside(ctx, x.err))
}

// Update implements index.KV.
func (kv *KV) Update(ctx context.Context, fn func(index.Txn) error) error {
	if err := kv.enter(ctx); err != nil {
		return err
	}
	defer kv.active.Done()
	lost := 0
	for n := 1; ; n++ {
		own, err := kv.run(ctx, fn)
		switch {
		case err == nil:
			return own
		case isConflict(err) && n < tries:
		case isConflict(err):
			return fmt.Errorf("%w: an update met others %d times", index.ErrUnavailable, n)
		case errors.Is(err, errLost) && lost < reconnects:
			lost++
			kv.pool.Reset()
		default:
			return fmt.Errorf("write the index: %w", outside(ctx, err))
		}
		if err := kv.wait(ctx, n); err != nil {
			return err
		}
		if n == 1 { // from now on this one runs alone among those that run again
			select {
			case kv.turn <- struct{}{}:
				defer func() { <-kv.turn }()
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	}
}

// wait pauses before the next try.
func (kv *KV) wait(ctx context.Context, n int) error {
	most := min(maxPause, time.Millisecond<<min(n, 10))
	pause := time.NewTimer(rand.N(most))
	defer pause.Stop()
	select {
	case <-pause.C:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// run runs fn once in a transaction. own is the error of fn, and err of the engine: if there is one, own says nothing.
func (kv *KV) run(ctx context.Context, fn func(index.Txn) error) (own, err error) {
	x := &txn{ctx: ctx, kv: kv, begin: beginUpdate, writable: true}
	defer x.end()
	own = fn(x)
	if x.err != nil {
		return nil, x.err
	}
	if own != nil { // it may be for what was read that fn failed: that has to have been so
		x.writes = writes{}
	}
	return own, x.commit()
}

// acquire returns a connection of the pool.
func (kv *KV) acquire(ctx context.Context) (*pgxpool.Conn, error) {
	c, err := kv.pool.Acquire(ctx)
	if err != nil && ctx.Err() == nil {
		err = unavailable(err)
	}
	return c, err
}

const (
	beginView   = "begin isolation level repeatable read, read only"
	beginUpdate = "begin isolation level serializable"
)

// statements are those on the tables of a schema.
type statements struct{ get, some, from, between, put, remove string }

func in(schema string) statements {
	t := pgx.Identifier{schema, "kv"}.Sanitize()
	pairs := fmt.Sprintf("select k, case when octet_length(v) <= %d then v end from %s where k >= $1", inlineBytes, t)
	return statements{
		get:     "select v from " + t + " where k = $1",
		some:    "select k, v from " + t + " where k = any($1)",
		from:    pairs + " order by k limit $2",
		between: pairs + " and k < $3 order by k limit $2",
		put: "insert into " + t + " (k, v) select * from unnest($1::bytea[], $2::bytea[])" +
			" on conflict (k) do update set v = excluded.v",
		remove: "delete from " + t + " where k = any($1)",
	}
}
