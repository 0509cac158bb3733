package staging

import (
	"errors"
	"fmt"
	"os"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

const (
	syncEvery = 64 << 20 // bytes after which the data is synced in the background, then a point that covers it saved
	saveEvery = 8 << 20  // bytes after which a point is saved that is good until the machine goes down
)

// Partial is one file on its way in, named by the digest that it shall have. What was written is hashed in the same
// pass, and neither read nor hashed again by whoever continues it later. It is not safe for concurrent use.
type Partial struct {
	area   *Area
	want   identity.Digest
	path   string
	size   int64
	file   *durable.File
	state  *durable.File
	hash   identity.Hash
	others bool   // hash it: its points have no hash
	coming coming // to hash
	off    int64
	behind []span     // that passed in segments, and Take did not come to
	saved  int64      // offset of the last saved point
	synced int64      // offset of the last background sync that was begun
	sync   chan error // holds the result of the background sync; nil: none was begun
}

// Partial opens the file with digest d and a size in bytes: where an earlier pull left it, or at its start. The disk
// space for the rest is taken at once where the filesystem can.
func (a *Area) Partial(d identity.Digest, size int64) (*Partial, error) {
	p := &Partial{area: a, want: d, path: a.part(d), size: size, hash: identity.NewHash(),
		coming: coming{hashes: a.hashes}}
	if err := p.open(); err != nil {
		return nil, fmt.Errorf("open the partial file of %s: %w", d, err)
	}
	return p, nil
}

func (p *Partial) open() (err error) {
	pt := bestPoint(p.path, p.size, p.area.boot)
	p.behind = bestSegments(p.path, p.size, p.area.boot).spans()
	switch {
	case pt.Offset > 0 && pt.Hash == nil: // others hashed it: see Brought
		pt, p.behind = point{}, []span{{0, pt.Offset}}
	case pt.Offset > 0:
		err = p.hash.UnmarshalBinary(pt.Hash)
	}
	switch {
	case err != nil, pt.Offset == 0, len(p.behind) > 0 && p.behind[0].off == 0 && p.behind[0].end > pt.Offset:
		pt = point{}
		p.hash = identity.NewHash()
	default:
		p.behind = nil
	}
	if pt.Offset == 0 && len(p.behind) == 0 {
		if err := p.area.drop(p.path); err != nil {
			return err
		}
	}
	// Modes follow the umask: this file is the one that will be published.
	if p.file, err = p.area.disk.OpenFile(p.path, os.O_RDWR|os.O_CREATE, 0o666); err != nil {
		return err
	}
	p.off = pt.Offset
	_, err = p.Take()
	p.synced = p.off
	if err == nil {
		err = p.area.retire(p.path, func(b []byte) bool {
			old, ok := decodePoint(b)
			return ok && old.Size == p.size && old.Offset <= pt.Offset
		})
	}
	if err == nil {
		err = p.save()
	}
	if err == nil && len(p.behind) == 0 {
		err = p.file.Truncate(p.off)
	}
	if err == nil && p.off < p.size {
		err = p.file.Reserve(p.size)
	}
	if err != nil {
		p.close()
	}
	return err
}

// Take goes on behind what lies at Offset because it passed in segments: it is hashed, and the digest of the file tells
// whether that was right. It returns where the next such bytes are, or the size: up to there bytes are to be written.
// They are not recorded: whoever continues the file later has what is before Offset.
func (p *Partial) Take() (end int64, err error) {
	p.Flush()
	for len(p.behind) > 0 && p.behind[0].off <= p.off {
		n := p.behind[0].end - p.off
		p.behind = p.behind[1:]
		err := readPieces(p.file, p.off, n, func(b []byte) error {
			p.area.hash(p.hash, b)
			p.off += int64(len(b))
			return nil
		})
		if err != nil {
			return p.off, err
		}
	}
	if len(p.behind) > 0 {
		return p.behind[0].off, nil
	}
	return p.size, nil
}

// Behind returns how many bytes behind Offset Take will find.
func (p *Partial) Behind() (n int64) {
	for _, s := range p.behind {
		n += max(0, s.end-max(s.off, p.off))
	}
	return n
}

// Offset returns the number of bytes that are there from the start.
func (p *Partial) Offset() int64 { return p.off }

// Write adds b at Offset. What was written before an error stays. ErrLost: another pull took the area over.
func (p *Partial) Write(b []byte) (n int, err error) {
	defer p.Flush()
	return p.Put(b)
}

// Put is Write, but b may be hashed later, with bytes of other files: until the next Put, Write, Flush or Finish returns
// it must stay as it is.
func (p *Partial) Put(b []byte) (n int, err error) {
	if err := p.area.Held(); err != nil {
		return 0, err
	}
	if int64(len(b)) > p.size-p.off {
		return 0, fmt.Errorf("more than the %d bytes that it shall have", p.size)
	}
	n, err = p.file.WriteAt(b, p.off)
	if !p.others {
		p.coming.write(p.hash, b[:n])
	}
	p.off += int64(n)
	if err == nil && p.off-p.saved >= saveEvery {
		err = p.save()
	}
	if err == nil && p.off-p.synced >= syncEvery {
		err = p.background()
	}
	return n, err
}

// Flush returns when all that was put is hashed.
func (p *Partial) Flush() { p.coming.flush() }

func (p *Partial) point() ([]byte, error) {
	pt := point{p.size, p.off, p.area.boot, nil}
	if p.others {
		return pt.encode()
	}
	p.Flush()
	var err error
	if pt.Hash, err = p.hash.MarshalBinary(); err != nil {
		return nil, err
	}
	return pt.encode()
}

// save keeps a point that is good as long as the machine runs: it is not worth a sync.
func (p *Partial) save() error {
	b, err := p.point()
	if err == nil && p.state == nil {
		p.state, err = p.area.fresh(p.path)
	}
	if err == nil {
		_, err = p.state.WriteAt(b, 0)
	}
	p.saved = p.off
	return err
}

// close closes the files and keeps what is in them.
func (p *Partial) close() error {
	p.Flush()
	err := p.file.Close()
	if p.state != nil {
		err = errors.Join(err, p.state.Close())
		p.state = nil
	}
	return err
}

// background syncs what is written so far, then saves a point that covers it, while more is written. One sync runs at a
// time; if the last one is still under way, the next comes later.
func (p *Partial) background() error {
	if p.sync != nil {
		select {
		case err := <-p.sync:
			p.sync = nil
			if err != nil {
				return err
			}
		default:
			return nil
		}
	}
	b, err := p.point()
	if err != nil {
		return err
	}
	p.synced = p.off
	p.sync = make(chan error, 1)
	go func(done chan<- error) { done <- syncWith(p.area.disk, p.file, p.path, b) }(p.sync)
	return nil
}

// wait returns the result of the background sync, if one was begun.
func (p *Partial) wait() error {
	if p.sync == nil {
		return nil
	}
	err := <-p.sync
	p.sync = nil
	return err
}

// Finish syncs the file and returns the digest of all its bytes, which its area can publish if it is the digest that the
// file shall have. It is called at Offset = size.
func (p *Partial) Finish() (identity.Digest, error) {
	if err := p.settle(); err != nil {
		return identity.Digest{}, err
	}
	p.matches()
	return identity.DigestOf(p.hash), nil
}

// settle syncs the whole file, and saves a point that says that it is there.
func (p *Partial) settle() error {
	if p.off != p.size {
		return fmt.Errorf("%d of %d bytes", p.off, p.size)
	}
	p.Flush()
	err := p.wait()
	if err == nil && p.size >= syncEvery {
		var b []byte
		if b, err = p.point(); err == nil {
			err = syncWith(p.area.disk, p.file, p.path, b)
		}
	} else if err == nil {
		if err = p.file.Sync(); err == nil {
			err = p.save()
		} else {
			err = errors.Join(err, p.area.disk.Remove(p.path+stateSuffix)) // see syncWith
		}
	}
	return err
}

// matches says whether the whole file is there and has its digest, and tells the area if so.
func (p *Partial) matches() bool {
	ok := p.off == p.size && identity.DigestOf(p.hash) == p.want
	if ok {
		p.area.verify(p.want)
	}
	return ok
}

// Reset drops everything and starts anew.
func (p *Partial) Reset() error {
	err := p.wait()
	if err = errors.Join(err, p.close(), p.area.drop(p.path)); err != nil {
		return err
	}
	p.hash = identity.NewHash()
	return p.open()
}

// Close keeps what is there for whoever continues it.
func (p *Partial) Close() error {
	err := p.wait()
	if err == nil && p.off > p.saved {
		err = p.save()
	}
	return errors.Join(err, p.close())
}

// Brought is one file on its way in whose caller writes all of it and hashes it besides. It is not safe for concurrent
// use.
type Brought struct{ p *Partial }

// Bring opens the file with digest d and a size in bytes, at its start: what is there of it is dropped. Whoever
// continues one that did not come to its end, in this area or a later one, has what is there hashed then.
func (a *Area) Bring(d identity.Digest, size int64) (*Brought, error) {
	p := &Partial{area: a, want: d, path: a.part(d), size: size, hash: identity.NewHash(), others: true}
	err := a.drop(p.path)
	if err == nil {
		err = p.open()
	}
	if err != nil {
		return nil, fmt.Errorf("open the partial file of %s: %w", d, err)
	}
	return &Brought{p}, nil
}

// WriteAt writes b, behind what was written before. ErrLost: another pull took the area over.
func (b *Brought) WriteAt(p []byte, off int64) (int, error) {
	if off != b.p.off {
		return 0, fmt.Errorf("bytes at %d of %s, of which %d bytes are there", off, b.p.want, b.p.off)
	}
	return b.p.Put(p)
}

// Commit is called with the digest that the caller has found all the bytes to have. It syncs the file, which its area
// can then publish. ErrUnverified: it should have another digest.
func (b *Brought) Commit(got identity.Digest) error {
	if got != b.p.want {
		return fmt.Errorf("the bytes of %s have the digest %s: %w", b.p.want, got, ErrUnverified)
	}
	if err := b.p.settle(); err != nil {
		return err
	}
	b.p.area.verify(got)
	return nil
}

// Close keeps what is there for whoever continues it.
func (b *Brought) Close() error { return b.p.Close() }
