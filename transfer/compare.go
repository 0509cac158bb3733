package transfer

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// maxManifestFile bounds a shard manifest on disk, in bytes: 4096 shards take less than 2 MiB.
const maxManifestFile = 16 << 20

// ErrNoIdentity: one side of a comparison names no base model.
var ErrNoIdentity = errors.New("no base model there")

// HealthError: a health check gave no answer that can be used.
type HealthError struct {
	URL string
	Err error
}

// Error is that of Err, which names the address.
func (e *HealthError) Error() string { return e.Err.Error() }

// Unwrap returns Err.
func (e *HealthError) Unwrap() error { return e.Err }

// Dial returns a client of the server at host. registry says that it was named as a registry; any other server must not
// be given a token that was meant for one.
type Dial func(host string, registry bool) (*client.Client, error)

// Side is one side of a comparison.
type Side struct {
	Name     string             // as it was given
	Summary  identity.Summary   // ShardCount and TotalSize are zero where only the aggregate is known
	Manifest *identity.Manifest // nil: the shards are not known
	// Provenance is that of the execution which a server states in its health answer; zero: none.
	Provenance identity.Digest
	Registry   string // that was named with it; empty: none was
	shard      func(ctx context.Context, s identity.Shard) (io.ReadCloser, error)
	client     *client.Client
	unlisted   string // why the shards are not known
}

// Learn asks a registry for the shards of a side of which only the aggregate is known. Where it can't tell, they stay
// unknown, and Compare says why.
func (s *Side) Learn(ctx context.Context, registry string, dial Dial) {
	var m identity.Manifest
	c, err := dial(registry, true)
	if err == nil {
		m, err = c.BaseManifest(ctx, s.Summary.Aggregate)
		c.Close()
	}
	if err == nil && !agree(s.Summary, m.Summary()) {
		err = fmt.Errorf("%s: its manifest of %s has another count or size of shards", registry, m.Aggregate)
	}
	if err != nil {
		s.unlisted = ": " + err.Error()
		return
	}
	s.Summary, s.Manifest, s.unlisted = m.Summary(), &m, ""
}

// Close drops the connections of a side.
func (s Side) Close() {
	if s.client != nil {
		s.client.Close()
	}
}

// OpenSide finds out what name stands for, and its identity: a directory, a file with a shard manifest, an aggregate, the
// address of a health check (http://…/health), or a reference to a registry. A directory is hashed.
func OpenSide(ctx context.Context, name string, dial Dial, o folder.Options, w Watch) (Side, error) {
	if a, is, err := ParseAggregate(name); is && err == nil {
		return Side{Name: name, Summary: identity.Summary{
			ManifestType: identity.ManifestType, AggregateAlgorithm: identity.AggregateAlgorithm, Aggregate: a,
		}}, nil
	}
	if strings.HasPrefix(name, "http://") || strings.HasPrefix(name, "https://") {
		return healthSide(ctx, name, dial)
	}
	switch info, err := os.Stat(name); {
	case err == nil && info.IsDir():
		return folderSide(ctx, name, o, w)
	case err == nil:
		return fileSide(name)
	}
	if _, is, err := ParseAggregate(name); is {
		return Side{}, err
	}
	ref, err := client.ParseReference(name)
	if err != nil {
		return Side{}, fmt.Errorf("%.200q is no directory, file, aggregate or address, and as a reference: %w", name, err)
	}
	return referenceSide(ctx, name, ref, dial)
}

func healthSide(ctx context.Context, name string, dial Dial) (Side, error) {
	u, err := url.Parse(name)
	if err != nil {
		return Side{}, err
	}
	c, err := dial(u.Host, false)
	if err != nil {
		return Side{}, err
	}
	defer c.Close()
	h, err := c.Health(ctx, name)
	if err != nil {
		return Side{}, &HealthError{name, err}
	}
	if h.BaseWeightIdentity == nil {
		return Side{}, fmt.Errorf("%s: %w: base_weight_identity is null, status %s, role %s", name, ErrNoIdentity, h.Status,
			h.Role)
	}
	if err := checkSummary(*h.BaseWeightIdentity); err != nil {
		return Side{}, &HealthError{name, fmt.Errorf("%s: base_weight_identity can't be compared: %w", name, err)}
	}
	s := Side{Name: name, Summary: *h.BaseWeightIdentity}
	if e := h.ExecutionIdentity; e != nil {
		s.Provenance, _ = identity.ParseDigest(e.Provenance) // zero where it is none
	}
	return s, nil
}

// checkSummary refuses a summary of another kind, which says nothing about the same bytes, and one that no base can have.
func checkSummary(s identity.Summary) error {
	switch {
	case s.ManifestType != identity.ManifestType:
		return fmt.Errorf("manifest_type is %.80q, want %q", s.ManifestType, identity.ManifestType)
	case s.AggregateAlgorithm != identity.AggregateAlgorithm:
		return fmt.Errorf("aggregate_algorithm is %.80q, want %q", s.AggregateAlgorithm, identity.AggregateAlgorithm)
	case s.Aggregate.IsZero():
		return errors.New("aggregate_sha256 names nothing")
	case s.ShardCount < 1 || s.ShardCount > identity.MaxShards:
		return fmt.Errorf("shard_count is %d, want 1 to %d", s.ShardCount, identity.MaxShards)
	case s.TotalSize < uint64(s.ShardCount):
		return fmt.Errorf("total_size_bytes is %d for %d shards, none of which is empty", s.TotalSize, s.ShardCount)
	}
	return nil
}

func fileSide(name string) (Side, error) {
	f, err := os.Open(name)
	if err != nil {
		return Side{}, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxManifestFile))
	if err != nil {
		return Side{}, err
	}
	m, err := identity.Parse(b)
	if wrong := folder.CheckKind(name, api.KindBase); err != nil && wrong != nil {
		return Side{}, wrong
	}
	if err != nil {
		return Side{}, fmt.Errorf("%s: %w", name, err)
	}
	return Side{Name: name, Summary: m.Summary(), Manifest: &m}, nil
}

func folderSide(ctx context.Context, name string, o folder.Options, w Watch) (Side, error) {
	f, err := folder.Open(name, o)
	if err != nil {
		return Side{}, in(name, err)
	}
	sum, err := HashFolder(ctx, f, w)
	if err != nil {
		return Side{}, in(name, err)
	}
	m := sum.Manifest
	s := Side{Name: name, Summary: m.Summary(), Manifest: &m}
	s.shard = func(_ context.Context, shard identity.Shard) (io.ReadCloser, error) {
		i := slices.IndexFunc(f.Shards, func(file folder.File) bool { return file.Name == shard.Filename })
		r, _, err := f.Read(f.Shards[i])
		return r, err
	}
	return s, nil
}

// in says in which folder something went wrong, unless the error says so itself.
func in(dir string, err error) error {
	if errors.As(err, new(*fs.PathError)) || errors.As(err, new(*folder.KindError)) ||
		errors.As(err, new(*folder.PartialError)) {
		return err
	}
	return fmt.Errorf("%s: %w", dir, err)
}

// HashFolder hashes the shards of a folder and tells w of it.
func HashFolder(ctx context.Context, f *folder.Folder, w Watch) (folder.Sum, error) {
	for _, file := range f.Shards {
		w.tell(Event{Step: Planned, Phase: PhaseHash, File: file.Name, Total: file.Size})
	}
	return f.Sum(ctx, func(file folder.File, done int64) {
		e := Event{Step: Moved, Phase: PhaseHash, File: file.Name, Bytes: done, Total: file.Size}
		if w.tell(e); done == file.Size {
			e.Step = Done
			w.tell(e)
		}
	})
}

func referenceSide(ctx context.Context, name string, ref client.Reference, dial Dial) (Side, error) {
	c, err := dial(ref.Host, true)
	if err != nil {
		return Side{}, err
	}
	plan, err := Resolve(ctx, c, ref)
	if err != nil {
		c.Close()
		return Side{}, err
	}
	if plan.NoBase != nil {
		c.Close()
		return Side{}, fmt.Errorf("%s: %w: %w", name, ErrNoIdentity, plan.NoBase)
	}
	s := Side{Name: name, Summary: plan.Base.Summary(), Manifest: &plan.Base, Registry: ref.Host, client: c}
	s.shard = func(ctx context.Context, shard identity.Shard) (io.ReadCloser, error) {
		return &resumed{ctx: ctx, c: c, repo: ref.Repo, shard: shard}, nil
	}
	return s, nil
}

// resumed reads a blob of a registry from its start to its end, through whatever breaks on the way.
type resumed struct {
	ctx   context.Context
	c     *client.Client
	repo  string
	shard identity.Shard
	at    int64
	body  io.ReadCloser
}

func (r *resumed) Read(p []byte) (n int, err error) {
	size := int64(r.shard.Size)
	if r.at == size {
		return 0, io.EOF
	}
	err = r.c.Retry(r.ctx, r.shard.Filename, func() (err error) {
		if r.body == nil {
			if r.body, err = r.c.Blob(r.ctx, r.repo, r.shard.Digest, r.at, size-r.at, size); err != nil {
				return err
			}
		}
		n, err = r.body.Read(p)
		r.at += int64(n)
		if err != nil && r.at < size {
			r.body.Close()
			r.body = nil
		}
		if n > 0 || err == io.EOF {
			return nil
		}
		return err
	})
	return n, err
}

func (r *resumed) Close() error {
	if r.body == nil {
		return nil
	}
	return r.body.Close()
}

// Comparison says whether two sides are the same multiset of shard bytes, and if not, how they differ.
type Comparison struct {
	Same         bool             `json:"same"`
	A            identity.Summary `json:"a"`
	B            identity.Summary `json:"b"`
	OnlyA        []identity.Shard `json:"-"` // of shards whose bytes the other side lacks; empty where they are not known
	OnlyB        []identity.Shard `json:"-"`
	Listed       bool             `json:"listed"`                  // the shards of both sides are known
	SameTensors  *bool            `json:"same_tensors,omitempty"`  // all are equal by content; nil: they were not compared
	TensorReason string           `json:"tensor_reason,omitempty"` // why they differ, or were not compared
	Derived
}

// Derived are statements that one of two different bases was made from the other, as registries know them. They explain
// the difference and make the two no more the same. The zero Derived: no statement is known.
type Derived struct {
	From []api.Derivation `json:"derived_from,omitempty"`
	More bool             `json:"more_derived_from,omitempty"` // there may be others
}

// derivedWait bounds how long one registry is asked about statements.
const derivedWait = 10 * time.Second

// DerivedFrom asks registries, each once, for the statements that link two bases. A registry that can't tell says
// nothing, and an empty name is none.
func DerivedFrom(ctx context.Context, registries []string, dial Dial, a, b identity.Aggregate) (d Derived) {
	if a.IsZero() || b.IsZero() || a == b {
		return d
	}
	ctx, cancel := context.WithTimeout(ctx, derivedWait)
	defer cancel()
	asked := map[string]bool{"": true}
	for _, host := range registries {
		if asked[host] {
			continue
		}
		asked[host] = true
		c, err := dial(host, true)
		if err != nil {
			continue
		}
		said, err := c.Compatibility(ctx, api.CompatibilityRequest{
			Question: api.QuestionSameBase, Base: &api.Side{Aggregate: a}, Other: &api.Side{Aggregate: b},
		})
		c.Close()
		if err != nil {
			continue
		}
		d.add(said, a, b)
	}
	return d
}

// add takes the statements about two bases from an answer.
func (d *Derived) add(said api.Compatibility, a, b identity.Aggregate) {
	d.More = d.More || said.MoreDerived
	for _, x := range said.Derived {
		same := func(y api.Derivation) bool { return y.Statement == x.Statement }
		if (x.From == a && x.To == b || x.From == b && x.To == a) && !slices.ContainsFunc(d.From, same) {
			d.From = append(d.From, x)
		}
	}
}

// Lines say it for people, one statement a line. They hold text of strangers.
func (d Derived) Lines() (lines []string) {
	for _, x := range d.From {
		lines = append(lines, fmt.Sprintf("%s was derived from %s by %s (statement %s)", x.To, x.From, x.How, x.Statement))
	}
	if d.More {
		lines = append(lines, "there may be more such statements")
	}
	return lines
}

// Compare sets two sides against each other. Where their shards differ and both sides' bytes can be had, their tensors are
// compared too: name, dtype, shape and content, however they are spread over files.
func Compare(ctx context.Context, a, b Side) (Comparison, error) {
	c := Comparison{Same: a.Summary.Aggregate == b.Summary.Aggregate, A: a.Summary, B: b.Summary}
	if a.Manifest != nil && b.Manifest != nil {
		d := identity.Compare(*a.Manifest, *b.Manifest)
		c.Listed, c.OnlyA, c.OnlyB = true, d.OnlyA, d.OnlyB
	}
	switch {
	case c.Same && !agree(c.A, c.B):
		return c, fmt.Errorf("%s and %s name one aggregate, but not the same count and size of shards: one of them is wrong",
			a.Name, b.Name)
	case c.Same:
		c.SameTensors = new(true)
	case !c.Listed:
		c.TensorReason = "the shards of one side are not known" + cmp.Or(a.unlisted, b.unlisted)
	case a.shard == nil || b.shard == nil:
		c.TensorReason = "the bytes of one side can't be had"
	default:
		reason, err := compareTensors(ctx, a, b, c)
		if err != nil {
			return c, fmt.Errorf("compare tensors: %w", err)
		}
		c.SameTensors, c.TensorReason = new(reason == ""), reason
	}
	return c, nil
}

// agree says whether what two sides of one aggregate state about it fits together.
func agree(a, b identity.Summary) bool {
	return a.ShardCount == 0 || b.ShardCount == 0 || a.ShardCount == b.ShardCount && a.TotalSize == b.TotalSize
}

// tensor is what a tensor is, apart from where it lies.
type tensor struct {
	dtype safetensors.DType
	shape string
	size  uint64 // bytes
	sum   identity.Digest
}

// compareTensors says in what the tensors of the differing shards differ; nothing where they do not. The headers are read
// first, since they are small and most often tell.
func compareTensors(ctx context.Context, a, b Side, c Comparison) (reason string, err error) {
	for _, content := range []bool{false, true} {
		of := func(s Side, shards []identity.Shard) (map[string]tensor, string, error) {
			return tensorsOf(ctx, s, shards, content)
		}
		ofA, why, err := of(a, c.OnlyA)
		if err != nil || why != "" {
			return why, err
		}
		ofB, why, err := of(b, c.OnlyB)
		if err != nil || why != "" {
			return why, err
		}
		if reason := differing(ofA, ofB); reason != "" {
			return reason, nil
		}
	}
	return "", nil
}

// tensorsOf lists the tensors of some shards, and hashes them if content is set. Two tensors of one name are no model.
func tensorsOf(ctx context.Context, s Side, shards []identity.Shard, content bool) (map[string]tensor, string, error) {
	all := map[string]tensor{}
	for _, shard := range shards {
		if shard.Size > math.MaxInt64 {
			return nil, fmt.Sprintf("%s of %s has %d bytes", shard.Filename, s.Name, shard.Size), nil
		}
		found, err := tensorsIn(ctx, s, shard, content)
		if err != nil {
			return nil, "", fmt.Errorf("%s of %s: %w", shard.Filename, s.Name, err)
		}
		for name, t := range found {
			if _, twice := all[name]; twice {
				return nil, fmt.Sprintf("tensor %.200q is twice in %s", name, s.Name), nil
			}
			all[name] = t
		}
	}
	return all, "", nil
}

// tensorsIn reads one shard once, from its start.
func tensorsIn(ctx context.Context, s Side, shard identity.Shard, content bool) (map[string]tensor, error) {
	r, err := s.shard(ctx, shard)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	h, rest, err := folder.Header(r, int64(shard.Size))
	var rule *safetensors.Error
	if errors.As(err, &rule) {
		return nil, safetensors.InFile(shard.Filename, err)
	}
	if err != nil {
		return nil, err
	}
	found, buf := make(map[string]tensor, len(h.Tensors)), make([]byte, folder.Piece)
	for _, t := range h.Tensors {
		is := tensor{dtype: t.DType, shape: fmt.Sprint(t.Shape), size: t.End - t.Begin}
		if content {
			if is.sum, err = sumOf(ctx, rest, int64(is.size), buf); err != nil {
				return nil, err
			}
		}
		found[t.Name] = is
	}
	return found, nil
}

// sumOf hashes the next n bytes of r. The tensors of a checked header lie one after another.
func sumOf(ctx context.Context, r io.Reader, n int64, buf []byte) (identity.Digest, error) {
	h := identity.NewHash()
	for n > 0 {
		if err := ctx.Err(); err != nil {
			return identity.Digest{}, context.Cause(ctx)
		}
		m, err := io.ReadFull(r, buf[:min(n, int64(len(buf)))])
		if err != nil {
			return identity.Digest{}, err
		}
		h.Write(buf[:m])
		n -= int64(m)
	}
	return identity.DigestOf(h), nil
}

// differing names what differs, the first few in order of name.
func differing(a, b map[string]tensor) string {
	const most = 5
	var names []string
	for name, t := range a {
		if b[name] != t {
			names = append(names, name)
		}
	}
	for name := range b {
		if _, ok := a[name]; !ok {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return ""
	}
	slices.Sort(names)
	s := fmt.Sprintf("%d tensors differ: %.200q", len(names), names[:min(most, len(names))])
	switch {
	case len(names) > most:
		s += " and more"
	case len(names) == 1:
		s = fmt.Sprintf("1 tensor differs: %.200q", names[0])
	}
	return s
}

// differences lists the files that are not the same in all plans, apart from the shards and the index, which follows
// their names.
func differences(plans []Plan) (diffs []FileDifference) {
	byName := map[string][]identity.Digest{}
	for i, p := range plans {
		for _, f := range p.Files {
			isShard := func(s identity.Shard) bool { return s.Filename == f.Name }
			if f.Name == indexName || slices.ContainsFunc(p.Base.Shards, isShard) {
				continue
			}
			if byName[f.Name] == nil {
				byName[f.Name] = make([]identity.Digest, len(plans))
			}
			byName[f.Name][i] = f.Digest
		}
	}
	for name, ds := range byName {
		if slices.ContainsFunc(ds, func(d identity.Digest) bool { return d != ds[0] }) {
			diffs = append(diffs, FileDifference{name, ds})
		}
	}
	slices.SortFunc(diffs, func(a, b FileDifference) int { return cmp.Compare(a.Name, b.Name) })
	return diffs
}
