package pgkv

import (
	"bytes"
	"slices"

	"github.com/jackc/pgx/v5"
)

const (
	firstPage = 128 // rows; a page of a listing is one round trip
	lastPage  = 1024
	// keptBytes and keptPages are about what a transaction keeps of what it read.
	keptBytes = 16 << 20
	keptPages = 64
)

// pair is a row of the table. A nil value is too long to have come with its page.
type pair struct{ key, value []byte }

// page is all that there is from a key on and before another.
type page struct {
	from, to []byte // a nil to is the end
	rows     []pair
}

func (p *page) has(key []byte) bool {
	return bytes.Compare(p.from, key) <= 0 && (p.to == nil || bytes.Compare(key, p.to) < 0)
}

func (p *page) find(key []byte) (int, bool) {
	return slices.BinarySearchFunc(p.rows, key, func(r pair, k []byte) int { return bytes.Compare(r.key, k) })
}

// seen is what a transaction keeps of what it read. When that is much it starts again.
type seen struct {
	values map[string][]byte // nil: there is no such key
	pages  []*page
	bytes  int
}

func (s *seen) count(n int) {
	if s.bytes += n; s.bytes > keptBytes || len(s.pages) > keptPages {
		*s = seen{bytes: n}
	}
}

func (s *seen) add(key, value []byte) {
	s.count(len(key) + len(value))
	if s.values == nil {
		s.values = map[string][]byte{}
	}
	s.values[string(key)] = value
}

// get returns the value of a key, nil if there is none. ok is false if that is not known.
func (s *seen) get(key []byte) (value []byte, ok bool) {
	if v, ok := s.values[string(key)]; ok {
		return v, true
	}
	p := s.page(key)
	if p == nil {
		return nil, false
	}
	i, found := p.find(key)
	if !found {
		return nil, true
	}
	return p.rows[i].value, p.rows[i].value != nil
}

// page returns one with the key; nil: there is none.
func (s *seen) page(key []byte) *page {
	for _, p := range slices.Backward(s.pages) {
		if p.has(key) {
			return p
		}
	}
	return nil
}

// cursor walks the rows of the table, page by page.
type cursor struct {
	x      *txn
	at, to []byte // the next row is not before at
	page   *page  // that of the last row
	row    int    // the next one of page
	size   int    // of the last page that was read
	ended  bool
}

// next returns the next row.
func (c *cursor) next() (p pair, more bool) {
	for !c.ended && c.x.err == nil {
		if c.page != nil && c.row < len(c.page.rows) {
			p = c.page.rows[c.row]
			c.row++
			if c.to != nil && bytes.Compare(p.key, c.to) >= 0 {
				break
			}
			return p, true
		}
		if c.page != nil {
			c.at = c.page.to
		}
		if c.at == nil || c.to != nil && bytes.Compare(c.at, c.to) >= 0 {
			break
		}
		if c.page = c.x.seen.page(c.at); c.page == nil {
			c.page = c.read()
		}
		if c.page != nil {
			c.row, _ = c.page.find(c.at)
		}
	}
	c.ended = true
	return pair{}, false
}

// read reads a page, nil if that fails. The first ones are small: many ranges are left after a few rows.
func (c *cursor) read() *page {
	c.size = min(lastPage, max(firstPage, 8*c.size))
	p, size := &page{from: c.at, to: c.to}, 0
	sql, args := c.x.kv.sql.from, []any{c.at, c.size}
	if c.to != nil {
		sql, args = c.x.kv.sql.between, append(args, c.to)
	}
	err := c.x.query(sql, args, func(r pgx.Rows) error {
		var row pair
		err := r.Scan(&row.key, &row.value)
		p.rows = append(p.rows, row)
		size += len(row.key) + len(row.value)
		return err
	})
	if err != nil {
		return nil
	}
	if len(p.rows) == c.size {
		p.to = append(bytes.Clone(p.rows[c.size-1].key), 0)
	}
	c.x.seen.count(size)
	c.x.seen.pages = append(c.x.seen.pages, p)
	return p
}

// value returns that of a row.
func (c *cursor) value(p pair) ([]byte, error) {
	if p.value != nil {
		return p.value, nil
	}
	return c.x.Get(p.key)
}
