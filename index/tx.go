package index

import (
	"bytes"
	"context"
	"errors"
	"iter"
)

// tx is a Txn with the forms of this package's values.
type tx struct{ Txn }

func (ix *Index) view(ctx context.Context, fn func(tx) error) error {
	return ix.kv.View(ctx, func(x Txn) error { return fn(tx{x}) })
}

// load returns the body of a value, nil if there is no such key.
func (t tx) load(k key) ([]byte, error) {
	v, err := t.Get(k)
	if err != nil || v == nil {
		return nil, err
	}
	return unseal(k, v)
}

func (t tx) store(k key, body []byte) error { return t.Put(k, seal(k, body)) }

// mark puts a row that is only a key.
func (t tx) mark(k key) error { return t.Put(k, nil) }

func (t tx) has(k key) (bool, error) {
	v, err := t.Get(k)
	return v != nil, err
}

// number loads a number; 0 if there is no such key.
func (t tx) number(k key) (uint64, error) {
	b, err := t.load(k)
	if err != nil || b == nil {
		return 0, err
	}
	return decodeNumber(b)
}

func (t tx) deleteAll(keys [][]byte) error {
	for _, k := range keys {
		if err := t.Delete(k); err != nil {
			return err
		}
	}
	return nil
}

// any says whether there is a key with the prefix.
func (t tx) any(prefix key) bool {
	for range t.Range(prefix, after(prefix)) {
		return true
	}
	return false
}

var errStop = errors.New("stop the walk")

// walk visits the pairs with from <= key < to. visit returns the key to go on from, nil meaning the next one, which it
// must not place behind; errStop ends the walk without an error.
func (t tx) walk(from, to []byte, visit func(k, v []byte) ([]byte, error)) error {
	for from != nil {
		at := from
		from = nil
		for k, v := range t.Range(at, to) {
			jump, err := visit(k, v)
			if err == errStop {
				return nil
			}
			if err != nil {
				return err
			}
			if jump != nil {
				from = jump
				break
			}
		}
		if from != nil && to != nil && bytes.Compare(from, to) >= 0 {
			return nil
		}
	}
	return nil
}

// limits bound one page of a listing, which is read in one transaction, and what is dropped in one.
type limits struct {
	rows  int // items
	bytes int // of their values
	steps int // keys visited
}

// page collects the items of one transaction.
type page[T any] struct {
	limits limits
	items  []T
	bytes  int
	steps  int
	next   []byte // where the next page starts; nil: there is none
}

func (p *page[T]) add(item T, size int) {
	p.items = append(p.items, item)
	p.bytes += size
}

// step counts a visited key; when the page is full it makes k the start of the next one and returns errStop.
func (p *page[T]) step(k []byte) error {
	if len(p.items) >= p.limits.rows || p.bytes >= p.limits.bytes || p.steps >= p.limits.steps {
		p.next = bytes.Clone(k)
		return errStop
	}
	p.steps++
	return nil
}

// paged yields the items that read collects, page after page. No transaction is open while the caller has an item.
func paged[T any](
	ctx context.Context, ix *Index, from []byte, read func(t tx, from []byte, p *page[T]) error,
) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		for at := from; at != nil; {
			var p page[T]
			err := ix.view(ctx, func(t tx) error {
				p = page[T]{limits: ix.limits}
				return read(t, at, &p)
			})
			if err != nil {
				yield(*new(T), err)
				return
			}
			for _, item := range p.items {
				if !yield(item, nil) {
					return
				}
			}
			at = p.next
		}
	}
}
