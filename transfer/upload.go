package transfer

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// leastChunk is the smallest piece that an upload is cut into, in bytes; nginx takes bodies of up to 1 MiB by default.
const leastChunk = 512 << 10

// firstChunk is the size of the pieces after the first refusal of a body, in bytes; the widest known gate that is not
// open takes 100 MB.
const firstChunk = 64 << 20

// rememberFor is how long an upload that was broken off is remembered. Registries forget theirs after about a week.
const rememberFor = 7 * 24 * time.Hour

// Source gives the bytes of one blob, any number of times.
type Source interface {
	// Open returns a reader of the bytes, and unchanged, which says whether they are still what was hashed.
	Open() (r io.ReadSeekCloser, unchanged func() error, err error)
}

// Uploader sends blobs and manifests to one repository. It is safe for concurrent use.
type Uploader struct {
	c     *client.Client
	repo  string
	watch Watch
	notes notes
	chunk atomic.Int64 // largest body that is known to be let through; zero: no limit met
	sent  atomic.Int64 // bytes that the registry took
}

// NewUploader returns an Uploader to a repository of the registry that c is a client of.
func NewUploader(c *client.Client, repo string, w Watch) *Uploader {
	return &Uploader{c: c, repo: repo, watch: w, notes: userNotes()}
}

// Sent returns how many bytes of blobs the registry took.
func (u *Uploader) Sent() int64 { return u.sent.Load() }

// Blob is one thing to upload.
type Blob struct {
	Name   string // for messages
	Digest identity.Digest
	Size   int64 // bytes
	Source Source
}

// Send makes sure that the repository holds b, and sends it if not. An upload that was broken off, also by the end of
// the process, goes on where it stopped. The blob is durable in the registry when this returns nil. The errors are those
// of client.Client and of b's Source.
func (u *Uploader) Send(ctx context.Context, b Blob) error {
	var mine *claim
	defer func() { mine.release() }()
	var up *client.Upload
	planned, held := false, false
	err := u.c.Retry(ctx, "upload "+b.Name, func() (err error) {
		if size, err := u.c.StatBlob(ctx, u.repo, b.Digest); err == nil && size == b.Size {
			held = true
			return nil
		} else if err != nil && !errors.Is(err, api.ErrBlobUnknown) {
			return err
		}
		if mine == nil && !planned {
			mine = u.notes.claim(u.c.Host() + "\n" + u.repo + "\n" + b.Digest.String())
		}
		if up, err = u.begin(ctx, up, b, mine); err != nil || up.Held() {
			held = err == nil
			return err
		}
		if !planned {
			planned = true
			u.watch.tell(Event{Step: Planned, Phase: PhaseUpload, File: b.Name, Total: b.Size})
		}
		return u.send(ctx, up, b, mine)
	})
	if err != nil {
		return fmt.Errorf("upload %s: %w", b.Name, err)
	}
	mine.forget()
	if held && !planned {
		u.watch.tell(Event{Step: Skipped, Phase: PhaseUpload, File: b.Name, Total: b.Size, Note: "the registry has it"})
		return nil
	}
	u.watch.tell(Event{Step: Done, Phase: PhaseUpload, File: b.Name, Bytes: b.Size, Total: b.Size})
	return nil
}

// begin goes on with the upload at hand, else with one that an earlier process remembered, else opens a new one.
func (u *Uploader) begin(ctx context.Context, up *client.Upload, b Blob, mine *claim) (*client.Upload, error) {
	if up != nil {
		err := up.Refresh(ctx)
		if err == nil || !gone(err) {
			return up, err
		}
	} else if location := mine.recall(); location != "" {
		old, err := u.c.ResumeUpload(ctx, u.repo, location)
		if err == nil && old.Offset() <= b.Size {
			u.watch.tell(Event{Step: Noted, File: b.Name,
				Note: fmt.Sprintf("%s: upload resumed at byte %d of %d", b.Name, old.Offset(), b.Size)})
			return old, nil
		}
		if err != nil && !gone(err) {
			return nil, err
		}
	}
	up, err := u.c.CreateUpload(ctx, u.repo, b.Digest, b.Size)
	if err != nil {
		return nil, err
	}
	if !up.Held() {
		mine.keep(up.Location())
	}
	return up, nil
}

// gone says that an upload can't be gone on with: registries that lost one answer 404, some 400 or 403.
func gone(err error) bool {
	return slices.Contains([]int{http.StatusNotFound, http.StatusBadRequest, http.StatusGone}, status(err))
}

// send sends what the registry lacks of b and closes the upload.
func (u *Uploader) send(ctx context.Context, up *client.Upload, b Blob, mine *claim) error {
	r, unchanged, err := b.Source.Open()
	if err != nil {
		return err
	}
	defer r.Close()
	if up.Offset() > b.Size {
		return errors.Join(fmt.Errorf("the registry holds %d bytes of a blob of %d", up.Offset(), b.Size), up.Abort(ctx))
	}
	for up.Offset() < b.Size {
		if err := u.append(ctx, up, b, r); err != nil {
			return errors.Join(unchanged(), err)
		}
		mine.keep(up.Location())
	}
	if err := unchanged(); err != nil {
		return errors.Join(err, up.Abort(ctx))
	}
	return up.Commit(ctx, b.Digest)
}

// append sends the next body. One that is refused for its size is not sent again: smaller ones follow. One that does not
// start where the registry is starts there the next time.
func (u *Uploader) append(ctx context.Context, up *client.Upload, b Blob, r io.ReadSeeker) error {
	n, limit := b.Size-up.Offset(), u.chunk.Load()
	if limit > 0 {
		n = min(n, limit)
	}
	at := up.Offset()
	if _, err := r.Seek(at, io.SeekStart); err != nil {
		return err
	}
	err := up.Append(ctx, &told{r: r, watch: u.watch, name: b.Name, total: b.Size}, n)
	if err == nil {
		u.sent.Add(n)
		return nil
	}
	if status(err) == http.StatusRequestedRangeNotSatisfiable {
		refreshed := up.Refresh(ctx)
		if refreshed == nil && up.Offset() == at {
			return err // the registry contradicts itself
		}
		return refreshed
	}
	if !tooLarge(err) || n <= leastChunk {
		return err
	}
	next := max(leastChunk, min(firstChunk, n/4))
	if u.chunk.CompareAndSwap(limit, next) {
		u.watch.tell(Event{Step: Noted, File: b.Name,
			Note: fmt.Sprintf("%s: a body of %d bytes was refused (%v); going on with %d at a time", b.Name, n, err, next)})
	}
	return up.Refresh(ctx)
}

// tooLarge says that a gate on the way does not let a body of that size through, or not within its time.
func tooLarge(err error) bool {
	return status(err) == http.StatusRequestEntityTooLarge || status(err) == 524
}

func status(err error) int {
	var s *client.StatusError
	if errors.As(err, &s) {
		return s.Status
	}
	return 0
}

// told tells how far a body has gone.
type told struct {
	r     io.ReadSeeker
	watch Watch
	name  string
	total int64
	at    int64 // in r; known after Seek
}

func (t *told) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	t.at += int64(n)
	t.watch.tell(Event{Step: Moved, Phase: PhaseUpload, File: t.name, Bytes: t.at, Total: t.total})
	return n, err
}

func (t *told) Seek(off int64, whence int) (at int64, err error) {
	t.at, err = t.r.Seek(off, whence)
	return t.at, err
}

// Bytes is a Source in memory.
type Bytes []byte

// Open implements Source.
func (b Bytes) Open() (io.ReadSeekCloser, func() error, error) {
	return nopCloser{bytes.NewReader(b)}, func() error { return nil }, nil
}

type nopCloser struct{ io.ReadSeeker }

func (nopCloser) Close() error { return nil }

// notes remember which uploads are open, so that another process can go on with them. They live in the user's cache; an
// empty notes remembers nothing. Nothing depends on them: what is lost is sent again.
type notes string

// note is one remembered upload.
type note struct {
	For      string `json:"for"`
	Location string `json:"location"`
}

// userNotes returns those of the user, or empty ones where there is no cache folder.
func userNotes() notes {
	dir, err := os.UserCacheDir()
	if err != nil {
		return ""
	}
	n := notes(filepath.Join(dir, "kiln", "uploads"))
	n.prune(time.Now())
	return n
}

// claim is the right to the note of one upload, which one process at a time has. A nil claim remembers nothing.
type claim struct {
	key  string
	path string // without extension
	lock *durable.Lock
}

func (c *claim) lockPath() string { return c.path + ".lock" }
func (c *claim) notePath() string { return c.path + ".json" }

// claim returns nil where another process is at that upload, or where nothing can be remembered.
func (n notes) claim(key string) *claim {
	if n == "" || (durable.Disk{}).MkdirAll(string(n), 0o700) != nil {
		return nil
	}
	c := &claim{key: key, path: filepath.Join(string(n), identity.Sum([]byte(key)).Hex())}
	var err error
	if c.lock, err = durable.Acquire(c.lockPath()); err != nil {
		return nil
	}
	return c
}

func (c *claim) release() {
	if c != nil {
		_ = os.Remove(c.lockPath())
		_ = c.lock.Release()
	}
}

func (c *claim) keep(location string) {
	if c == nil {
		return
	}
	if b, err := json.Marshal(note{c.key, location}); err == nil {
		_ = durable.Disk{}.WriteFile(c.notePath(), b, 0o600)
	}
}

func (c *claim) recall() string {
	if c == nil {
		return ""
	}
	b, err := os.ReadFile(c.notePath())
	var is note
	if err != nil || json.Unmarshal(b, &is) != nil || is.For != c.key {
		return ""
	}
	return is.Location
}

func (c *claim) forget() {
	if c != nil {
		_ = os.Remove(c.notePath())
	}
}

// prune forgets what is too old to be of use.
func (n notes) prune(now time.Time) {
	entries, err := os.ReadDir(string(n))
	if err != nil {
		return
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil && now.Sub(info.ModTime()) > rememberFor {
			_ = os.Remove(filepath.Join(string(n), e.Name()))
		}
	}
}
