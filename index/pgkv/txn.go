package pgkv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kiln-registry/kiln-registry/index"
)

const (
	// maxKeyBytes is the longest key: PostgreSQL has three in a page of its index.
	maxKeyBytes = index.MaxKeyBytes
	// inlineBytes is the longest value that comes with a page of a range. Longer ones are fetched one by one.
	inlineBytes = 16 << 10
)

// txn is one transaction. It begins on the server with the first statement, in the same round trip; what is written is
// sent with the commit. What was read is kept: the state that it reads does not change.
type txn struct {
	ctx      context.Context
	kv       *KV
	begin    string // the statement
	writable bool
	conn     *pgxpool.Conn // nil: not yet begun, or ended
	err      error         // of the engine; everything fails from then on
	writes   writes
	seen     seen
}

var errReadOnly = errors.New("write in a view")

// fail keeps the engine's first error.
func (x *txn) fail(err error) error {
	if x.err == nil && x.conn != nil && isGone(err) {
		err = fmt.Errorf("%w: %w", errLost, err)
	}
	if x.err == nil {
		x.err = err
	}
	return x.err
}

// query runs a statement and calls row for each of its rows. A transaction that begins with it on a connection that was
// lost long ago begins on another one.
func (x *txn) query(sql string, args []any, row func(pgx.Rows) error) error {
	if x.err != nil {
		return x.err
	}
	if x.conn != nil {
		rows, _ := x.conn.Query(x.ctx, sql, args...)
		if err := each(rows, row); err != nil {
			return x.fail(err)
		}
		return nil
	}
	for n := 0; ; n++ {
		err := x.first(sql, args, row)
		if err == nil {
			return nil
		}
		if x.conn == nil || n == reconnects || !isGone(err) || x.ctx.Err() != nil {
			return x.fail(err)
		}
		x.drop()
		x.kv.pool.Reset()
	}
}

// first begins the transaction and runs its first statement.
func (x *txn) first(sql string, args []any, row func(pgx.Rows) error) (err error) {
	if x.conn, err = x.kv.acquire(x.ctx); err != nil {
		x.conn = nil
		return err
	}
	b := &pgx.Batch{}
	b.Queue(x.begin)
	b.Queue(sql, args...)
	all := x.conn.SendBatch(x.ctx, b)
	if _, err := all.Exec(); err != nil {
		all.Close()
		return err
	}
	rows, _ := all.Query()
	return errors.Join(each(rows, row), all.Close())
}

func each(rows pgx.Rows, row func(pgx.Rows) error) error {
	defer rows.Close()
	for rows.Next() {
		if err := row(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

// commit sends what was written and ends the transaction. What it returns is a conflict, errLost if nothing was kept,
// errUnknown, or an error of the server, by which nothing was kept. It does not stop when ctx ends.
func (x *txn) commit() error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(x.ctx), commitTimeout)
	defer cancel()
	b := &pgx.Batch{}
	if x.conn == nil {
		if len(x.writes.values) == 0 {
			return nil
		}
		c, err := x.kv.acquire(ctx)
		if err != nil {
			return err
		}
		x.conn = c
		b.Queue(x.begin)
	}
	x.writes.queue(b, x.kv.sql)
	b.Queue("commit")
	data := x.conn.Conn().PgConn().CustomData()
	delete(data, warned)
	tag, before, err := send(ctx, x.conn, b)
	switch {
	case err == nil && tag != "COMMIT":
		return fmt.Errorf("the server answers a commit with %s", tag)
	case err == nil && data[warned] != nil && len(x.writes.values) > 0:
		x.drop()
		return fmt.Errorf("%w: %v", errUnknown, data[warned])
	case err == nil || !isGone(err):
		return err
	case before || len(x.writes.values) == 0 || pgconn.SafeToRetry(err):
		return fmt.Errorf("%w: %w", errLost, err)
	}
	return fmt.Errorf("%w: %w", errUnknown, err)
}

// send runs a batch in one round trip and returns what the server says to the last statement. before says of an error
// that it came before the server ran that one, for certain.
func send(ctx context.Context, c *pgxpool.Conn, b *pgx.Batch) (tag string, before bool, err error) {
	all := c.SendBatch(ctx, b)
	for n := range b.Len() {
		t, err := all.Exec()
		if err != nil {
			all.Close()
			var answer *pgconn.PgError
			var unsent pgx.ErrPreprocessingBatch
			return "", errors.As(err, &unsent) || n < b.Len()-1 && errors.As(err, &answer), err
		}
		tag = t.String()
	}
	return tag, false, all.Close()
}

// end gives the connection back. The caller does not wait for the server to end the transaction.
func (x *txn) end() {
	c := x.conn
	x.conn = nil
	if x.err == nil {
		x.err = errors.New("the transaction has ended")
	}
	switch {
	case c == nil:
	case c.Conn().PgConn().TxStatus() == 'I' || c.Conn().IsClosed():
		c.Release()
	default:
		x.kv.active.Go(func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(x.ctx), 5*time.Second)
			defer cancel()
			_, _ = c.Exec(ctx, "rollback") // if it fails, Release closes the connection
			c.Release()
		})
	}
}

// drop closes the connection.
func (x *txn) drop() {
	c := x.conn.Hijack()
	x.conn = nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(x.ctx), time.Second)
	defer cancel()
	_ = c.Close(ctx)
}

// Get implements index.Txn.
func (x *txn) Get(key []byte) ([]byte, error) {
	if x.err != nil {
		return nil, x.err
	}
	if v, ok := x.writes.values[string(key)]; ok {
		return v, nil
	}
	if v, ok := x.seen.get(key); ok {
		return v, nil
	}
	return x.fetch(key)
}

// fetch gets a value from the server.
func (x *txn) fetch(key []byte) (value []byte, err error) {
	err = x.query(x.kv.sql.get, []any{key}, func(r pgx.Rows) error { return r.Scan(&value) })
	if err == nil {
		x.seen.add(key, value)
	}
	return value, err
}

// Prefetch implements index.Prefetcher.
func (x *txn) Prefetch(keys ...[]byte) error {
	var ask [][]byte
	for _, k := range keys {
		_, known := x.seen.get(k)
		if _, own := x.writes.values[string(k)]; !known && !own {
			ask = append(ask, k)
		}
	}
	if len(ask) == 0 {
		return x.err
	}
	found := make(map[string][]byte, len(ask))
	err := x.query(x.kv.sql.some, []any{ask}, func(r pgx.Rows) error {
		var k, v []byte
		err := r.Scan(&k, &v)
		found[string(k)] = v
		return err
	})
	if err != nil {
		return err
	}
	for _, k := range ask {
		x.seen.add(k, found[string(k)])
	}
	return nil
}

// Put implements index.Txn.
func (x *txn) Put(key, value []byte) error {
	return x.write(key, append(make([]byte, 0, len(value)), value...))
}

// Delete implements index.Txn.
func (x *txn) Delete(key []byte) error { return x.write(key, nil) }

func (x *txn) write(key, value []byte) error {
	switch {
	case x.err != nil:
		return x.err
	case !x.writable:
		return errReadOnly
	case len(key) == 0 || len(key) > maxKeyBytes:
		return fmt.Errorf("write a key of %d bytes", len(key))
	}
	x.writes.put(string(key), value)
	return nil
}

// Range implements index.Txn.
func (x *txn) Range(from, to []byte) iter.Seq2[[]byte, []byte] {
	from, to = append([]byte{}, from...), bytes.Clone(to)
	return func(yield func([]byte, []byte) bool) {
		own, stored := x.writes.between(from, to), cursor{x: x, at: from, to: to}
		p, more := stored.next()
		for more || len(own) > 0 && x.err == nil {
			if len(own) > 0 && (!more || own[0] <= string(p.key)) {
				k := own[0]
				own = own[1:]
				if more && k == string(p.key) {
					p, more = stored.next()
				}
				if v := x.writes.values[k]; v != nil && !yield([]byte(k), v) {
					return
				}
				continue
			}
			v, err := stored.value(p)
			if err != nil || !yield(p.key, v) {
				return
			}
			p, more = stored.next()
		}
	}
}
