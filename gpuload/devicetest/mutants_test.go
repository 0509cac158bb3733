//go:build mutants

package devicetest

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// mutants are the faults in the code itself that the suite must notice: a file of gpuload, and pairs of a text in it
// and what stands in its place. Run with -tags mutants: each is compiled and put through the suite of every target that
// the file is part of, and each of them must fail.
var mutants = []struct {
	name, file string
	edits      []string
}{
	{"publish before synchronise", "load.go", []string{
		"err := l.target.Wait(ctx); err != nil", "err := ctx.Err(); err != nil"}},
	{"publish before the last shard", "load.go", []string{"n < int64(len(order));", "n < int64(len(order))-1;"}},
	{"aggregate not compared", "load.go", []string{"want != m.Aggregate", "false"}},
	{"shard not compared", "lane.go", []string{"m.Shards[i].Digest != got", "false"}},
	{"size not compared", "plan.go", []string{"m.Shards[i].Size != uint64(s.Size)", "false"}},
	{"hash before the fill completes", "lane.go", []string{
		"start := time.Now()\n\t\tdata, err", "start := time.Now()\n" +
			"\t\tto.hash <- chunk{buf: buf, data: buf.data[:min(s.Size-off, int64(len(buf.data)))], off: off}\n\t\tdata, err",
		"to.hash <- c", ""}},
	{"recycle without waiting for the copy", "lane.go", []string{
		"err := t.Wait(ctx); err != nil", "err := func(Token) error { return nil }(t); err != nil"}},
	{"recycle when hashed", "lane.go", []string{
		"buf.refs.Store(int32(2 + len(l.blocks[i])))", "buf.refs.Store(2)",
		"c.buf.release()\n\t\t}\n\t\tl.copy", "}\n\t\tl.copy"}},
	{"recycle when copied", "lane.go", []string{
		"buf.refs.Store(int32(2 + len(l.blocks[i])))", "buf.refs.Store(int32(1 + len(l.blocks[i])))",
		"c.buf.release()\n\t\tif ctx.Err() != nil {\n\t\t\treturn stopped(ctx, s, c.off)\n\t\t}\n\t}\n\tl.seen",
		"if ctx.Err() != nil {\n\t\t\treturn stopped(ctx, s, c.off)\n\t\t}\n\t}\n\tl.seen"}},
	{"recycle before it is kept", "lane.go", []string{
		"buf.refs.Store(int32(2 + len(l.blocks[i])))", "buf.refs.Store(int32(1 + len(l.blocks[i])))",
		"c.buf.release()\n\t\tif ctx.Err() != nil {\n\t\t\treturn stopped(ctx, s, c.off)\n\t\t}\n\t}\n\treturn nil",
		"if ctx.Err() != nil {\n\t\t\treturn stopped(ctx, s, c.off)\n\t\t}\n\t}\n\treturn nil"}},
	{"kept before the digest matched", "lane.go", []string{
		"if err := l.check(i); err != nil {\n\t\treturn err",
		"if err := kept.Commit(l.seen[i]); err != nil {\n\t\treturn err",
		"return s.diskError(s.Size, kept.Commit(l.seen[i]))", "return l.check(i)"}},
	{"failed write to the disk forgotten", "lane.go", []string{
		"_, err := to.WriteAt(b, off)", "_, err := to.WriteAt(b, off)\n\t\terr = nil"}},
	{"header not kept", "lane.go", []string{"write(s.header, 0)", "write(s.header[:8], 0)"}},
	{"kept file left open", "lane.go", []string{"e := kept.Close(); err == nil", "e := error(nil); err == nil"}},
	{"replicate to one device only", "plan.go", []string{
		"slices.Repeat([][]int{all},", "slices.Repeat([][]int{all[:1]},"}},
	{"replicate copies to the first only", "lane.go", []string{
		"l.target.Submit(ctx, data, b, off-s.Data)", "l.target.Submit(ctx, data, b*0+l.blocks[i][0], off-s.Data)"}},
	{"spread to one device only", "plan.go", []string{"free[best] -= sizes[i]", ""}},
	{"handles without their shard", "readback.go", []string{"handles[block].Shard = i", "handles[block].Shard = 0 * i"}},
	{"copy to the wrong offset", "lane.go", []string{"data, b, off-s.Data)", "data, b, 0)"}},
	{"header not hashed", "plan.go", []string{"h.Write(b)", "h.Write(b[:8])"}},
	{"change during the load not noticed", "lane.go", []string{
		"err := s.unchanged(f, s.Size); err != nil", "ctx.Err() != nil"}},
	{"change before the load not noticed", "lane.go", []string{
		"err := s.unchanged(f, 0); err != nil", "ctx.Err() != nil"}},
	{"free memory not looked at", "plan.go", []string{"need+o.Reserve > d.Free", "false"}},
	{"failed load keeps its memory", "load.go", []string{
		"e := t.Free(); e != nil", "e := err; e == nil",
		"err = errors.Join(err, l.target.Free())", "_ = 0"}},
	{"read back not compared", "readback.go", []string{
		"got := identity.DigestOf(h); got != want", "got := identity.DigestOf(h); false"}},
	{"not read back", "load.go", []string{"err == nil && l.o.VerifyDevice", "false"}},
	{"goes on without pins in silence", "ring.go", []string{
		`o.notify("buffers are not pinned, copies are slower: %v", why)`, ""}},
	{"cancel after the last copy ignored", "load.go", []string{
		"if err := ctx.Err(); err != nil {\n\t\treturn m,", "if err != nil {\n\t\treturn m,"}},
	{"not sealed", "hostmem/hostmem.go", []string{"unix.F_SEAL_WRITE | unix.F_SEAL_GROW", "unix.F_SEAL_GROW"}},
	{"published for writing", "hostmem/hostmem.go", []string{
		`os.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))`,
		`os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), os.O_RDWR, 0)`}},
	{"failed copy forgotten", "hostmem/hostmem.go", []string{"t.failed.CompareAndSwap(nil, &err)", ""}},
	{"failed copy forgotten by CUDA", "cuda/target.go", []string{"t.failed.CompareAndSwap(nil, &err)", ""}},
	{"event not waited for", "cuda/device.go", []string{
		`err := d.call("cuEventSynchronize", d.eventSync, event); err != nil`, "err := error(nil); err != nil"}},
	{"event before its copy", "cuda/target.go", []string{
		"if err := to.d.toDevice(to.ptr+uint64(off), buf, to.stream); err != nil {\n\t\t\t\treturn err\n\t\t\t}\n" +
			"\t\t\tdone.event, err = to.d.record(to.stream)\n\t\t\treturn err",
		"if done.event, err = to.d.record(to.stream); err != nil {\n\t\t\t\treturn err\n\t\t\t}\n" +
			"\t\t\treturn to.d.toDevice(to.ptr+uint64(off), buf, to.stream)"}},
	{"streams not synchronised", "cuda/target.go", []string{
		`return d.call("cuStreamSynchronize", d.streamSync, s)`, "_ = s; return nil"}},
	{"no context", "cuda/device.go", []string{`d.call("cuCtxSetCurrent", d.setCurrent, d.context)`, "error(nil)"}},
	{"any thread", "cuda/device.go", []string{"runtime.LockOSThread()\n\tdefer runtime.UnlockOSThread()", ""}},
	{"block shared with others", "cuda/target.go", []string{
		"(b.size + b.d.granularity - 1) / b.d.granularity * b.d.granularity", "b.size"}},
	{"copy past the block", "cuda/target.go", []string{"int64(n) > size-off", "false"}},
	{"blocks not freed", "cuda/target.go", []string{"if b.ptr == 0 {\n\t\treturn nil", "if b.size > 0 {\n\t\treturn nil"}},
	{"pins left", "cuda/target.go", []string{"return t.devices[0].unregister(at)", "return nil"}},
}

func TestMutants(t *testing.T) {
	suites, killed := 0, 0
	defer func() {
		t.Logf("mutants: %d, killed: %d of %d suites that they went through", len(mutants), killed, suites)
	}()
	for _, m := range mutants {
		t.Run(m.name, func(t *testing.T) {
			path, err := filepath.Abs(filepath.Join("..", m.file))
			if err != nil {
				t.Fatal(err)
			}
			code, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			for i := 0; i < len(m.edits); i += 2 {
				if n := strings.Count(string(code), m.edits[i]); n != 1 {
					t.Fatalf("%s has %q %d times, want it once", m.file, m.edits[i], n)
				}
			}
			for _, target := range targets(m.file) {
				out, err := runSuite(t, target, path, strings.NewReplacer(m.edits...).Replace(string(code)))
				if strings.Contains(out, "[build failed]") || strings.Contains(out, "[setup failed]") {
					t.Fatalf("the mutant does not compile:\n%s", out)
				}
				suites++
				if err != nil {
					killed++
				} else {
					t.Errorf("the suite of %s passes with this mutant", target)
				}
			}
		})
	}
}

// targets are those whose code a file is part of.
func targets(file string) []string {
	if target, _, ok := strings.Cut(file, "/"); ok {
		return []string{target}
	}
	return []string{"hostmem", "cuda"}
}

// runSuite runs the suite of a target with the code of one file replaced.
func runSuite(t *testing.T, target, path, code string) (string, error) {
	dir := t.TempDir()
	mutant := filepath.Join(dir, "mutant.go")
	mustDo(t, os.WriteFile(mutant, []byte(code), 0o666))
	overlay, err := json.Marshal(map[string]any{"Replace": map[string]string{path: mutant}})
	mustDo(t, err)
	file := filepath.Join(dir, "overlay.json")
	mustDo(t, os.WriteFile(file, overlay, 0o666))
	args := []string{"test", "-timeout=60s", "-failfast", "-vet=off", "-overlay", file, "../" + target}
	out, err := exec.Command("go", args...).CombinedOutput()
	return string(out), err
}
