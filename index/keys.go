package index

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

// Tables. A key is the letter of its table and then the parts named here. Texts end with a zero byte, which no text
// may contain, digests are their 32 bytes, times 8 bytes in nanoseconds, numbers 8 bytes: so every key reads back in
// one way only, and the order of keys is the order of their parts. A time written ~created is inverted, so that the
// newest comes first. Listing rows are empty: the record stands once, in the manifest's row.
//
// Each page of an engine that a change touches is written anew, so rows that are written together begin alike where
// they can, or go behind those that were written before.
const (
	tableAggregate         = 'a' // aggregate, kind, repo, ~created, manifest: the JSON of a listing; zero aggregate: unbound
	tableBlob              = 'b' // blob, repo, number of the put, manifest: the manifest refers to the blob
	tableContent           = 'c' // manifest, and then one of the parts below
	tableListed            = 'd' // repo, manifest, index: the index, a manifest too, lists the manifest
	tableExpiry            = 'e' // until, blob, repo: a lease by the time it ends
	tableGone              = 'g' // blob: number and time of the batch by which it was removed last
	tableHolder            = 'h' // name: who has the lease of that name
	tableLink              = 'k' // target, relation, repo, ~created, manifest: the manifest links to the target
	tableLease             = 'l' // blob, repo: size, until
	tableManifest          = 'm' // repo, manifest, and then one of the parts below
	tableName              = 'n' // NameTarget, kind, repo, ~created, manifest: those of tableAggregate that have a name
	tableOwed              = 'o' // repo, seq: the refs of a change that the store may lack
	tableReplica           = 'p' // id: a process that uses the index
	tableSequence          = 'q' // repo: no number above it was issued or seen
	tableRepo              = 'r' // repo, ~created, manifest
	tableSubject           = 's' // repo, subject, hash of the artifact type, ~created, manifest
	tableTag               = 't' // repo, tag: manifest, seq
	tableUpload            = 'u' // id: upload
	tableUploadExpiry      = 'w' // expires, id
	tableTagGone           = 'x' // repo, tag: seq of the change after which the tag is gone
	tableManifestGone      = 'y' // repo, manifest: seq of its last delete, kept also when it is put again
	tableState             = 'z' // one of the names below
	stateCheckpoint        = "checkpoint"
	stateRemoval           = "removal"
	stateFormat            = "format"
	stateNote              = "note/" // and its name
	stateReset             = "reset" // there while Reset is at work; the last key of all
	maxText                = 255     // bytes of a text in a key; api.MaxRepoBytes
	maxKey                 = 1024    // bytes; the longest key has less than two texts, three digests and a time
	formatVersion     byte = 7
)

// Parts of tableContent, which are the same in every repository, but for the holders.
const (
	partBytes  byte = 1 + iota // the manifest
	partShards                 // the shard manifest of a base
	partHolder                 // repo
)

// Parts of tableManifest. There may be tags and bindings before there is a record.
const (
	partRecord  byte = 1 + iota // the first one: listings look no further
	partRefers                  // the digests that it refers to
	partTag                     // tag that points to it
	partLists                   // the digests of the manifests that it lists, of an index
	partBinding                 // ~created, statement: the aggregate to which that binds it
)

type key []byte

func in(table byte) key { return append(make(key, 0, 128), table) }

func (k key) text(s string) key { return append(append(k, s...), 0) }

func (k key) rest(s string) key { return append(k, s...) }

func (k key) part(p byte) key { return append(k, p) }

func (k key) sum(d [32]byte) key { return append(k, d[:]...) }

func (k key) ascending(n uint64) key { return binary.BigEndian.AppendUint64(k, n) }

func (k key) newest(t time.Time) key { return binary.BigEndian.AppendUint64(k, ^ordered(t)) }

func (k key) oldest(t time.Time) key { return binary.BigEndian.AppendUint64(k, ordered(t)) }

// ordered maps a time to a number with the same order.
func ordered(t time.Time) uint64 { return uint64(t.UnixNano()) ^ 1<<63 }

// after returns the smallest key that is greater than every key with the prefix; nil means that there is none.
func after(prefix []byte) []byte {
	end := bytes.Clone(prefix)
	for i := len(end) - 1; i >= 0; i-- {
		if end[i]++; end[i] != 0 {
			return end[:i+1]
		}
	}
	return nil
}

// parts reads a key back. Once a part is missing, bad is set and every further part is zero.
type parts struct {
	left []byte
	bad  bool
}

func split(k []byte) *parts { return &parts{left: k[1:]} }

func (p *parts) take(n int) []byte {
	if p.bad || len(p.left) < n {
		p.bad = true
		return make([]byte, n)
	}
	b := p.left[:n]
	p.left = p.left[n:]
	return b
}

func (p *parts) text() string {
	i := bytes.IndexByte(p.left, 0)
	if i < 0 {
		p.bad = true
		return ""
	}
	return string(p.take(i + 1)[:i])
}

func (p *parts) rest() string { return string(p.take(len(p.left))) }

func (p *parts) sum() identity.Digest { return identity.Digest(p.take(32)) }

func (p *parts) time() uint64 { return binary.BigEndian.Uint64(p.take(8)) }

// err says whether the key had exactly the parts that were read.
func (p *parts) err() error {
	if p.bad || len(p.left) > 0 {
		return errKey
	}
	return nil
}

var errKey = fmt.Errorf("%w: malformed key", ErrDamaged)

// typeSum stands for an artifact type in keys: types come from clients and may be of any length.
func typeSum(artifactType string) identity.Digest { return identity.Sum([]byte(artifactType)) }

// listing ends a key of a listing.
func (r Record) listing(k key) key { return k.text(r.Repo).newest(r.Created).sum(r.Digest) }

func (r Record) aggregateKey(a identity.Aggregate) key {
	return r.listing(in(tableAggregate).sum(a).text(string(r.Kind)))
}

func (r Record) nameKey(a identity.Aggregate) key {
	return r.listing(in(tableName).sum(NameTarget(a, r.Name)).text(string(r.Kind)))
}

func (r Record) linkKey(l Link) key { return r.listing(in(tableLink).sum(l.Target).text(l.Relation)) }

func (r Record) subjectKey() key {
	return in(tableSubject).text(r.Repo).sum(r.Subject).sum(typeSum(r.ArtifactType)).newest(r.Created).sum(r.Digest)
}

func (r Record) repoKey() key { return r.listing(in(tableRepo)) }

// contentKey is that of a part of a manifest's content.
func contentKey(d identity.Digest, part byte) key { return in(tableContent).sum(d).part(part) }

// manifestKey is that of a part of what is known of a manifest in a repository.
func manifestKey(repo string, d identity.Digest, part byte) key {
	return in(tableManifest).text(repo).sum(d).part(part)
}

// recordKeyOf reads the key of a row of tableManifest. found is false for the rows of other parts than the record.
func recordKeyOf(k []byte) (repo string, d identity.Digest, found bool, err error) {
	p := split(k)
	repo, d = p.text(), p.sum()
	found = p.take(1)[0] == partRecord
	if !found {
		p.rest()
	}
	return repo, d, found, p.err()
}

// bindingKey is that of what a statement says about a manifest of its repository.
func (r Record) bindingKey(target identity.Digest) key {
	return manifestKey(r.Repo, target, partBinding).newest(r.Created).sum(r.Digest)
}

func manifestGoneKey(repo string, d identity.Digest) key {
	return in(tableManifestGone).text(repo).sum(d)
}

func blobKey(d identity.Digest, repo string) key { return in(tableBlob).sum(d).text(repo) }

func listedKey(repo string, d identity.Digest) key { return in(tableListed).text(repo).sum(d) }

func leaseKey(d identity.Digest, repo string) key { return in(tableLease).sum(d).text(repo) }

func expiryKey(until time.Time, d identity.Digest, repo string) key {
	return in(tableExpiry).oldest(until).sum(d).text(repo)
}

func tagKey(repo, tag string) key { return in(tableTag).text(repo).rest(tag) }

func tagGoneKey(repo, tag string) key { return in(tableTagGone).text(repo).rest(tag) }

func uploadKey(id string) key { return in(tableUpload).rest(id) }

func uploadExpiryKey(u Upload) key { return in(tableUploadExpiry).oldest(u.Expires).rest(u.ID) }

func sequenceKey(repo string) key { return in(tableSequence).text(repo) }

func goneKey(d identity.Digest) key { return in(tableGone).sum(d) }

func holderKey(name string) key { return in(tableHolder).rest(name) }

func owedKey(repo string, seq uint64) key { return in(tableOwed).text(repo).ascending(seq) }

func replicaKey(id string) key { return in(tableReplica).rest(id) }

func stateKey(name string) key { return in(tableState).rest(name) }

// prefetch asks for keys that will be got.
func (t tx) prefetch(keys []key) error {
	p, ok := t.Txn.(Prefetcher)
	if !ok || len(keys) == 0 {
		return nil
	}
	all := make([][]byte, len(keys))
	for i, k := range keys {
		all[i] = k
	}
	return p.Prefetch(all...)
}

// reads are the keys that ops are known to get.
func reads(ops []Op) (keys []key) {
	get := func(ks ...key) { keys = append(keys, ks...) }
	manifest := func(repo string, d identity.Digest) {
		get(manifestGoneKey(repo, d), manifestKey(repo, d, partRecord))
	}
	for _, o := range ops {
		if n, ok := o.(numbered); ok {
			repo, _ := n.number()
			get(sequenceKey(repo))
		}
		switch o := o.(type) {
		case PutManifest:
			manifest(o.Repo, o.Digest)
			get(manifestKey(o.Repo, o.Digest, partRefers), contentKey(o.Digest, partBytes), contentKey(o.Digest, partShards))
		case DeleteManifest:
			manifest(o.Repo, o.Digest)
			get(manifestKey(o.Repo, o.Digest, partRefers), manifestKey(o.Repo, o.Digest, partLists))
		case PutTag:
			manifest(o.Repo, o.Digest)
			get(tagKey(o.Repo, o.Tag), tagGoneKey(o.Repo, o.Tag))
		case DeleteTag:
			get(tagKey(o.Repo, o.Tag), tagGoneKey(o.Repo, o.Tag))
		case LinkBlob:
			get(leaseKey(o.Digest, o.Repo))
		case UnlinkBlob:
			get(leaseKey(o.Digest, o.Repo))
		case PutUpload:
			get(uploadKey(o.ID))
		case DeleteUpload:
			get(uploadKey(o.ID))
		case Next:
			get(sequenceKey(o.Repo))
		case Unremoved:
			get(stateKey(stateRemoval))
		}
	}
	return keys
}
