// Package blobstore is the contract of the place where bytes live: blobs keyed by their SHA-256, uploads that survive
// the process, and refs. The store is the truth of a registry; its index is a view of it.
package blobstore

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

var (
	// ErrNotFound: the store holds no such blob.
	ErrNotFound = errors.New("blob not found")
	// ErrQuarantined: the bytes of the blob were found damaged and are set aside. It is an ErrNotFound too: whoever has
	// the right bytes may push them, which heals the blob.
	ErrQuarantined = fmt.Errorf("%w: its bytes are damaged and in quarantine", ErrNotFound)
	// ErrUploadUnknown: no upload of that id is open.
	ErrUploadUnknown = errors.New("upload unknown")
	// ErrUploadBusy: another call is appending to that upload, or is committing or aborting it.
	ErrUploadBusy = errors.New("upload is in use by another request")
	// ErrOffset: an Append did not start at the upload's size.
	ErrOffset = errors.New("append does not start at the end of the upload")
	// ErrDigestMismatch: the bytes received do not hash to the digest asked for. Nothing was kept.
	ErrDigestMismatch = errors.New("digest mismatch")
	// ErrSizeMismatch: more or fewer bytes were received than Create was told.
	ErrSizeMismatch = errors.New("size mismatch")
	// ErrNoSpace: the store is full. What was acknowledged before is kept.
	ErrNoSpace = errors.New("no space left in the store")
	// ErrDamaged: the store's own records do not read back as they were written.
	ErrDamaged = errors.New("store is damaged")
	// ErrCut: the blob has not as many bytes as were stored, so that it is damaged without that anybody has to read it. It
	// is an ErrNotFound and an ErrDamaged too: whoever has the right bytes may push them, which heals the blob.
	ErrCut = fmt.Errorf("%w: %w", ErrNotFound, ErrDamaged)
	// ErrIntact: the bytes of a copy that was to be set aside are those of its digest. It is shown as any other.
	ErrIntact = errors.New("blob is intact")
	// ErrRefsDamaged: refs that were kept are missing, or do not read back as they were kept; the error says where. It is
	// an ErrDamaged too. What is left can be gone on with by an Open that accepts the loss.
	ErrRefsDamaged = fmt.Errorf("%w: its refs", ErrDamaged)
	// ErrNotStore: the place is not a store of this kind, or not yet made one.
	ErrNotStore = errors.New("not a store")
	// ErrInUse: another process owns the store.
	ErrInUse = errors.New("store is in use")
	// ErrReadOnly: the store was opened to be read only.
	ErrReadOnly = errors.New("store is open for reading only")
	// ErrUnavailable: the place where the store is can't be reached, or is overloaded, also after retries.
	ErrUnavailable = errors.New("store is not available")
)

// Info describes one stored blob.
type Info struct {
	Digest     identity.Digest
	Size       int64     // bytes
	Created    time.Time // when it was committed
	Generation string    // names this copy: a blob deleted and uploaded again has another one
}

// Store keeps blobs. Any number of goroutines may use one at a time, and it retries what is transient. Every error
// that is not one of this package's is the engine's own and not a statement about the content.
type Store interface {
	// Stat describes a blob, or returns ErrNotFound. With ErrCut it describes the copy all the same, for SetAside.
	Stat(ctx context.Context, d identity.Digest) (Info, error)
	// Open reads n bytes of the copy that i, which Stat, Commit or List gave, names, from off; n < 0 means to the end. The
	// reader implements io.WriterTo in a way that lets an HTTP response use sendfile where the engine has a file.
	// ErrNotFound, also when there is another copy by now. ErrDamaged, ErrCut for example, if the engine sees that it
	// can't give the bytes that were stored: List yields such a copy as it is.
	Open(ctx context.Context, i Info, off, n int64) (io.ReadCloser, error)
	// Create opens an upload. hint is the digest that Commit will ask for, or zero; size the number of bytes to come,
	// or negative when not known. Both are promises of the client: Append refuses what goes past size.
	Create(ctx context.Context, hint identity.Digest, size int64) (Upload, error)
	// Resume opens an upload again by its id, also after the process that created it is gone: at the last byte that was
	// received and synced, with the hash state that belongs to it, or as the receipt that it left, see Upload.
	// ErrUploadUnknown.
	Resume(ctx context.Context, id string) (Upload, error)
	// Delete removes the copy that i names, also one that was set aside. A later upload of the same digest is untouched.
	// ErrNotFound.
	Delete(ctx context.Context, i Info) error
	// List yields all blobs with a digest greater than after, in ascending order; zero means from the start.
	List(ctx context.Context, after identity.Digest) iter.Seq2[Info, error]
}

// Upload is one blob on its way in. At most one of Append, Commit, Finish and Abort runs at a time, over all processes:
// the others get ErrUploadBusy at once. Size and ID may be called at any time.
//
// An upload that has become a blob stays as a receipt until Abort, also over the end of the process: whoever did not
// hear of its end, or could not note it, does not send anything again. Its Size is that of the blob. Commit and Finish
// with the same digest return the blob's Info; with another one they are ErrDigestMismatch, and the receipt goes.
// Bytes behind its end are ErrUploadUnknown. It holds while the store shows the blob: after that the upload is unknown.
// A receipt for which no Append had returned may be lost when the process or the machine fails; then the upload is
// unknown, or as it was before.
type Upload interface {
	ID() string  // letters, digits and '-' only; unguessable
	Size() int64 // bytes received
	// Append reads r to its end and hashes and stores what it gets at off, which must equal Size (ErrOffset). It returns
	// the number of bytes it kept, which stay also when r fails in the middle. On a nil error they are synced, and the
	// saved hash state covers them. ErrSizeMismatch. ErrNoSpace, after which the upload is as it was before the call,
	// so that the store is not kept full by what nobody was told is there; an engine that can't give back single pieces
	// of it keeps those.
	Append(ctx context.Context, off int64, r io.Reader) (int64, error)
	// Commit makes the upload the blob want, durable and visible on return, and leaves a receipt. If the store already
	// holds want, one copy stays: what was just verified replaces the one that was there, whose bytes may have rotted
	// since, wherever that costs no more than to drop it, and Info names the one that stays. Readers of the other one go
	// on with it, but it can't be opened again. ErrDigestMismatch and ErrSizeMismatch keep nothing.
	Commit(ctx context.Context, want identity.Digest) (Info, error)
	// Finish is Append and Commit in one call, without making durable on the way what the blob will make durable. If r
	// fails, the upload stays with what was received, as after an Append that failed. The errors are those of both.
	Finish(ctx context.Context, off int64, r io.Reader, want identity.Digest) (Info, error)
	// Abort drops the upload and its bytes, or the receipt, but never the blob. It is no error if it is gone already.
	Abort(ctx context.Context) error
}

// Uploads lists open uploads and receipts, so that abandoned ones can be purged.
type Uploads interface {
	// Uploads yields every open upload and every receipt, in no order.
	Uploads(ctx context.Context) iter.Seq2[UploadInfo, error]
}

// UploadInfo describes an open upload, or a receipt.
type UploadInfo struct {
	ID      string
	Hint    identity.Digest // what Create was told; zero for nothing
	Size    int64           // bytes received
	Touched time.Time       // last time a byte was stored
	Blob    identity.Digest // what it became, also if that is gone by now; zero: it is open
}

// Ref is one acknowledged change of a repository: a name (a tag, or a manifest digest in text form) that now points
// to a manifest, or no longer does. Refs, with the blobs, are all that is needed to rebuild an index.
type Ref struct {
	Repo      string
	Name      string          // a tag, or the text form of Digest
	Seq       uint64          // issued by the index, ascending within the repository: the higher one is the later one
	Deleted   bool            // a tombstone: Name is gone
	Digest    identity.Digest // the manifest; for a tombstone what Name pointed to, if known
	MediaType string
	Manifest  []byte    // the manifest's exact bytes; empty for tombstones and where a tag names a manifest put before
	Time      time.Time // when the registry accepted it
	Finding   string    // what the registry found the manifest to be when it accepted it; empty: nothing is kept of that
}

// Position is a place in the order in which a store keeps its refs. The zero Position is before the first. Positions
// are only comparable within one store.
type Position uint64

// Refs keeps refs. Any number of goroutines may use one at a time.
type Refs interface {
	// Put keeps refs, all or none, and returns the position after them. They are durable on return; concurrent calls
	// share one sync. ErrNoSpace.
	Put(ctx context.Context, refs ...Ref) (Position, error)
	// Since yields the refs after a position, each with the position after it, in the order in which they were kept.
	// Groups that one Put kept together are yielded completely or, after a crash, not at all. ErrRefsDamaged, also if the
	// refs end before that position.
	Since(ctx context.Context, after Position) iter.Seq2[PlacedRef, error]
}

// PlacedRef is a ref with the position after it.
type PlacedRef struct {
	Ref
	After Position
}

// Dropped is a part of the refs of a store that Open left out, as it reads as no refs: what a process that was killed
// had not written to its end, which was not acknowledged, or damage.
type Dropped struct {
	Where string // names the log and the place in it
	Bytes int64  // 0: what was there is gone
	Kept  string // where the bytes are kept for people to look at; empty: there was no space for them
}

// String says it in one line.
func (d Dropped) String() string {
	text := fmt.Sprintf("%s: left out %d bytes that read as no refs, the end of an unfinished write or damage",
		d.Where, d.Bytes)
	switch {
	case d.Bytes == 0:
		return d.Where + " is not there: left out"
	case d.Kept == "":
		return text + "; there was no space to keep them"
	}
	return text + "; they are kept in " + d.Kept
}

// Losses is implemented by stores that say what Open left out of their refs.
type Losses interface {
	// Dropped returns it in order; nothing: all refs that are there could be read, as far as Open read them.
	Dropped() []Dropped
}

// Quarantine is implemented by stores that can set damaged blobs aside.
type Quarantine interface {
	// SetAside hides the copy that i names and keeps its bytes for people to look at; why says in one line what is wrong
	// with them. It is durable. From then on Stat and Open of the digest are ErrQuarantined, and List leaves it out, until
	// another copy is committed, which removes what was set aside. ErrNotFound if that copy is not shown. ErrIntact if the
	// store took it for cut itself, and has found now, by reading it, that it is not.
	SetAside(ctx context.Context, i Info, why string) error
	// Aside yields what is set aside, in no order.
	Aside(ctx context.Context) iter.Seq2[AsideInfo, error]
}

// AsideInfo describes a copy that was set aside.
type AsideInfo struct {
	Info
	Why   string
	Since time.Time
}

// Segments is implemented by stores that record hash states while they receive a blob.
type Segments interface {
	// Segments returns the midstates of the copy that i names, in the form kiln.sha256-midstates.v1. ErrNotFound if none
	// were recorded, ErrMidstatesDamaged, which is that too, if those that are there can't be used. They come from hashing
	// the blob's bytes, but whoever uses them checks them by the blob's digest.
	Segments(ctx context.Context, i Info) ([]byte, error)
	// KeepSegments makes form, of somebody who has hashed all bytes of the copy that i names, its midstates, in place of
	// those that are there. It is durable. ErrNotFound if that copy is not shown, ErrMidstatesDamaged if form can't be
	// midstates of it. ErrNoSpace.
	KeepSegments(ctx context.Context, i Info, form []byte) error
}

// Sweeper is implemented by stores in which a process that was killed can leave bytes that nothing shows.
type Sweeper interface {
	// Sweep removes such bytes if they are older than before, and returns how many objects those were. It spares what
	// running uploads need, of this process and of others.
	Sweep(ctx context.Context, before time.Time) (removed int, err error)
}
