package index

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"iter"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

func (o LinkBlob) check() error {
	return cmp.Or(checkText("repository", o.Repo), checkDigest(o.Digest), checkTime("until", o.Until))
}

func (o LinkBlob) apply(t *change) error {
	k := leaseKey(o.Digest, o.Repo)
	was, found, err := t.lease(k)
	if err != nil || found && !was.until.Before(o.Until) {
		return err
	}
	if found {
		if err := t.Delete(expiryKey(was.until, o.Digest, o.Repo)); err != nil {
			return err
		}
	}
	if err := t.mark(expiryKey(o.Until, o.Digest, o.Repo)); err != nil {
		return err
	}
	return t.store(k, lease{o.Size, o.Until}.encode())
}

func (t tx) lease(k key) (l lease, found bool, err error) {
	b, err := t.load(k)
	if err != nil || b == nil {
		return l, false, err
	}
	l, err = decodeLease(b)
	return l, err == nil, err
}

// LinkBlobs yields all LinkBlobs that are known, in order of blob and repository, also those that have ended. One that
// does not read back is left out.
func (ix *Index) LinkBlobs(ctx context.Context) iter.Seq2[LinkBlob, error] {
	return paged(ctx, ix, in(tableLease), func(t tx, from []byte, p *page[LinkBlob]) error {
		return t.walk(from, after(in(tableLease)), func(k, v []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			parts := split(k)
			o := LinkBlob{Digest: parts.sum(), Repo: parts.text()}
			b, err := unseal(k, v)
			if cmp.Or(err, parts.err()) != nil {
				return nil, nil
			}
			if l, err := decodeLease(b); err == nil {
				o.Size, o.Until = l.size, l.until
				p.add(o, len(k)+len(v))
			}
			return nil, nil
		})
	})
}

func (o UnlinkBlob) check() error {
	return cmp.Or(checkText("repository", o.Repo), checkDigest(o.Digest))
}

func (o UnlinkBlob) apply(t *change) error {
	if t.any(blobKey(o.Digest, o.Repo)) {
		return fmt.Errorf("unlink %s from %s: %w", o.Digest, o.Repo, ErrReferred)
	}
	return t.dropLease(o.Digest, o.Repo)
}

func (t tx) dropLease(d identity.Digest, repo string) error {
	k := leaseKey(d, repo)
	was, found, err := t.lease(k)
	if err != nil || !found {
		return err
	}
	if err := t.Delete(expiryKey(was.until, d, repo)); err != nil {
		return err
	}
	return t.Delete(k)
}

// Visible says whether a blob is visible in a repository at a time: a manifest of the repository refers to it, or a
// LinkBlob lasts longer than now.
func (ix *Index) Visible(ctx context.Context, repo string, d identity.Digest, now time.Time) (visible bool, err error) {
	err = ix.view(ctx, func(t tx) error {
		l, found, err := t.lease(leaseKey(d, repo))
		visible = found && now.Before(l.until) || t.any(blobKey(d, repo))
		return err
	})
	return visible, err
}

// LinkedUntil returns when the LinkBlob of a blob in a repository ends, or ended; the zero time if there is none.
func (ix *Index) LinkedUntil(ctx context.Context, repo string, d identity.Digest) (until time.Time, err error) {
	err = ix.view(ctx, func(t tx) error {
		l, _, err := t.lease(leaseKey(d, repo))
		until = l.until
		return err
	})
	return until, err
}

// Referred says whether a manifest of any repository refers to a blob.
func (ix *Index) Referred(ctx context.Context, d identity.Digest) (referred bool, err error) {
	err = ix.view(ctx, func(t tx) error {
		referred = t.any(in(tableBlob).sum(d))
		return nil
	})
	return referred, err
}

// ReferredOf returns those of some blobs to which a manifest of any repository refers.
func (ix *Index) ReferredOf(ctx context.Context, ds []identity.Digest) (referred []identity.Digest, err error) {
	err = ix.view(ctx, func(t tx) error {
		referred = nil
		for _, d := range ds {
			if t.any(in(tableBlob).sum(d)) {
				referred = append(referred, d)
			}
		}
		return nil
	})
	return referred, err
}

// Blobs yields the blobs to which manifests refer, each once, in order of digest and after a given one; zero: from the
// start.
func (ix *Index) Blobs(ctx context.Context, last identity.Digest) iter.Seq2[identity.Digest, error] {
	from := []byte(in(tableBlob))
	if !last.IsZero() {
		from = after(in(tableBlob).sum(last))
	}
	return paged(ctx, ix, from, func(t tx, from []byte, p *page[identity.Digest]) error {
		return t.walk(from, after(in(tableBlob)), func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			parts := split(k)
			d := parts.sum()
			if parts.bad {
				return nil, parts.err()
			}
			p.add(d, len(k))
			return after(in(tableBlob).sum(d)), nil
		})
	})
}

// Referrer is a manifest that refers to a blob.
type Referrer struct {
	Repository string          `json:"repository"`
	Digest     identity.Digest `json:"digest"` // of the manifest
}

// BlobReferrers yields the manifests that refer to a blob: by repository in byte order, and in order of their last put.
func (ix *Index) BlobReferrers(ctx context.Context, d identity.Digest) iter.Seq2[Referrer, error] {
	prefix := in(tableBlob).sum(d)
	return paged(ctx, ix, prefix, func(t tx, from []byte, p *page[Referrer]) error {
		return t.walk(from, after(prefix), func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			parts := split(k)
			parts.sum()
			r := Referrer{Repository: parts.text()}
			parts.time() // the number of the put
			r.Digest = parts.sum()
			p.add(r, len(k))
			return nil, parts.err()
		})
	})
}

// Uses says whether a blob is visible in any repository at a time.
func (ix *Index) Uses(ctx context.Context, d identity.Digest, now time.Time) (bool, error) {
	for _, err := range ix.Holders(ctx, d, now) {
		return err == nil, err
	}
	return false, nil
}

// Holders yields the repositories in which a blob is visible at a time, in byte order.
func (ix *Index) Holders(ctx context.Context, d identity.Digest, now time.Time) iter.Seq2[string, error] {
	return paged(ctx, ix, []byte{}, func(t tx, from []byte, p *page[string]) error {
		for repo := from; ; {
			next, visible, err := t.nextHolder(d, repo, now)
			if err != nil || next == "" {
				return err
			}
			if p.step([]byte(next)) != nil {
				return nil
			}
			if visible {
				p.add(next, len(next))
			}
			repo = after(key(nil).text(next))
		}
	})
}

// nextHolder returns the first repository not before from that has a row for the blob.
func (t tx) nextHolder(d identity.Digest, from []byte, now time.Time) (repo string, visible bool, err error) {
	for _, table := range []byte{tableBlob, tableLease} {
		prefix := in(table).sum(d)
		for k, v := range t.Range(append(prefix, from...), after(prefix)) {
			parts := split(k)
			parts.sum()
			found := parts.text()
			if repo != "" && found > repo {
				break
			}
			if table == tableBlob {
				repo, visible = found, true
				break
			}
			b, err := unseal(k, v)
			if err != nil {
				return "", false, err
			}
			l, err := decodeLease(b)
			if err != nil {
				return "", false, err
			}
			live := now.Before(l.until)
			repo, visible = found, live || visible && found == repo
			break
		}
	}
	return repo, visible, nil
}

func (o PutUpload) check() error {
	return cmp.Or(checkText("upload id", o.ID), checkText("repository", o.Repo), checkTime("expires", o.Expires))
}

func (o PutUpload) apply(t *change) error {
	if err := (DeleteUpload{o.ID}).apply(t); err != nil {
		return err
	}
	if err := t.mark(uploadExpiryKey(o.Upload)); err != nil {
		return err
	}
	return t.store(uploadKey(o.ID), encodeUpload(o.Upload))
}

func (o DeleteUpload) check() error { return checkText("upload id", o.ID) }

func (o DeleteUpload) apply(t *change) error {
	was, found, err := t.upload(o.ID)
	if err != nil || !found {
		return err
	}
	if err := t.Delete(uploadExpiryKey(was)); err != nil {
		return err
	}
	return t.Delete(uploadKey(o.ID))
}

func (t tx) upload(id string) (u Upload, found bool, err error) {
	b, err := t.load(uploadKey(id))
	if err != nil || b == nil {
		return u, false, err
	}
	u, err = decodeUpload(id, b)
	return u, err == nil, err
}

// Upload returns an open upload, also one that has expired. ErrNotFound.
func (ix *Index) Upload(ctx context.Context, id string) (u Upload, err error) {
	err = ix.view(ctx, func(t tx) (err error) {
		found := false
		if u, found, err = t.upload(id); err == nil && !found {
			err = fmt.Errorf("upload %.80q: %w", id, ErrNotFound)
		}
		return err
	})
	return u, err
}

// ExpiredUploads yields the uploads that expire at now or before, the longest expired first.
func (ix *Index) ExpiredUploads(ctx context.Context, now time.Time) iter.Seq2[Upload, error] {
	end := in(tableUploadExpiry).oldest(now.Add(1))
	return paged(ctx, ix, in(tableUploadExpiry), func(t tx, from []byte, p *page[Upload]) error {
		return t.walk(from, end, func(k, _ []byte) ([]byte, error) {
			if err := p.step(k); err != nil {
				return nil, err
			}
			parts := split(k)
			parts.time()
			u, found, err := t.upload(parts.rest())
			if err == nil && !found {
				err = fmt.Errorf("%w: expiry of an unknown upload", ErrDamaged)
			}
			p.add(u, len(k))
			return nil, err
		})
	})
}

// Purge forgets the LinkBlobs that end at now or before, and returns how many there were. They count for nothing since
// they ended; Purge gives their space back.
func (ix *Index) Purge(ctx context.Context, now time.Time) (int, error) {
	end := in(tableExpiry).oldest(now.Add(1))
	for total := 0; ; {
		n := 0
		err := ix.kv.Update(ctx, func(x Txn) error {
			t := tx{x}
			var ended [][]byte
			for k := range t.Range(in(tableExpiry), end) {
				if ended = append(ended, bytes.Clone(k)); len(ended) == ix.limits.steps {
					break
				}
			}
			n = len(ended)
			return t.endLeases(ended)
		})
		total += n
		if err != nil || n < ix.limits.steps {
			return total, err
		}
	}
}

func (t tx) endLeases(expiries [][]byte) error {
	for _, k := range expiries {
		parts := split(k)
		parts.time()
		d, repo := parts.sum(), parts.text()
		if err := cmp.Or(parts.err(), t.deleteAll([][]byte{k, leaseKey(d, repo)})); err != nil {
			return err
		}
	}
	return nil
}
