package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload"
	kiln "github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
	"github.com/kiln-registry/kiln-registry/gpuload/resident"
	"github.com/kiln-registry/kiln-registry/identity"
)

// offer is what another process is told about blocks. Their descriptors come by themselves, in order, over descriptor 3.
type offer struct {
	UUID   string
	Blocks []gpuload.Handle
	Loaded time.Duration // what it took to bring them there
}

// found is what another process answers.
type found struct {
	Seconds  float64 // to open all blocks, the context being there
	Taken    int64   // bytes of the device that are not free any more
	SHA256   []string
	ReadOnly bool
}

// holder is a model that this process holds as kiln-pull resident does.
type holder struct {
	Socket    string
	Aggregate identity.Aggregate
	loaded    time.Duration // what it took to load it
}

// attach lets other processes attach to what this one holds, by both kinds of handles.
func attach(ctx context.Context, r *report) error {
	for _, kind := range []string{cuda.KindIPC, cuda.KindVMM} {
		t, err := cuda.OpenShared(kind, r.Device)
		if errors.Is(err, errors.ErrUnsupported) {
			err = r.leave(kind, err)
		} else if err == nil {
			err = r.hold(ctx, t, func(h holder) error {
				return errors.Join(r.byGo(ctx, kind, h), r.byPython(ctx, kind, h), r.byTorch(ctx, kind, h))
			})
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// hold loads the small model and answers on a socket while fn runs.
func (r *report) hold(ctx context.Context, t gpuload.Target, fn func(holder) error) (err error) {
	folder, err := os.MkdirTemp(r.Sockets, "held-")
	if err != nil {
		return errors.Join(err, t.Free())
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	l, err := resident.Listen(ctx, "127.0.0.1:0", false)
	if err != nil {
		return errors.Join(err, t.Free())
	}
	ctx, end := context.WithCancel(ctx)
	defer end()
	s := resident.Server{Backend: cuda.Backend, Socket: filepath.Join(folder, "socket"), Drain: 5 * time.Second}
	said := make(chan error, 1)
	asked := false
	err = s.Run(ctx, l, func(ctx context.Context) (resident.Held, error) {
		w, err := verified(ctx, r.Shm, r.SmallShards, t, gpuload.Options{})
		return resident.Held{Weights: w, At: time.Now()}, err
	}, func(h resident.Held) error {
		asked = true
		go func() {
			said <- fn(holder{h.Socket, h.Weights.Manifest().Aggregate, h.Weights.Stats().Elapsed})
			end()
		}()
		return nil
	})
	if asked {
		err = errors.Join(<-said, err)
	}
	return err
}

// byGo attaches with the Go client.
func (r *report) byGo(ctx context.Context, kind string, h holder) error {
	told, err := json.Marshal(h)
	if err != nil {
		return err
	}
	cmd, err := again(ctx, "client", r.config)
	if err != nil {
		return err
	}
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(told), &stderr
	out, err := cmd.Output()
	var f found
	if err == nil {
		err = json.Unmarshal(out, &f)
	}
	if err != nil {
		return r.need(kind+": another process attaches", "an answer", false, "%v: %s", err, lastLine(stderr.String()))
	}
	return errors.Join(r.compare(kind, f), r.opened(kind, f, h.loaded), r.taken(kind, f))
}

// opened reports what it took to open the blocks, beside what it took to load them.
func (r *report) opened(name string, f found, loaded time.Duration) error {
	ratio := f.Seconds / loaded.Seconds()
	return errors.Join(
		r.figure(name+": open", "%d blocks in %.1f ms", len(f.SHA256), f.Seconds*1e3),
		r.goal(name+": open / load, in time", "≤ 1/100", ratio <= 0.01, "1/%.0f", 1/ratio),
		r.figure(name+": mapped only for reading", "%v", f.ReadOnly))
}

// byPython attaches with the Python client, which hashes everything again.
func (r *report) byPython(ctx context.Context, kind string, h holder) error {
	name := kind + ": Python"
	if _, err := os.Stat(r.Client); err != nil || r.Python == "" {
		return r.leave(name, "no python3, or no "+r.Client)
	}
	cmd := bound(ctx, r.Python, r.Client, h.Aggregate.String(), "--socket", h.Socket, "--check")
	out, err := cmd.CombinedOutput()
	said, _, _ := strings.Cut(lastLine(string(out)), " are sha256:")
	return r.need(name, "ok", err == nil, "%s", said)
}

// torchScript compares what torch sees of each tensor with what the driver reads of it. It ends with 9 where there is
// no torch that finds a device.
const torchScript = `
import sys
sys.path.insert(0, sys.argv[1])
import kiln_attach
try:
    import torch
except ImportError:
    print("torch is not installed"), sys.exit(9)
if not torch.cuda.is_available():
    print("torch finds no device"), sys.exit(9)
with kiln_attach.attach(sys.argv[2], sys.argv[3]) as held:
    before = torch.cuda.memory_allocated()
    tensors = held.tensors()
    taken = torch.cuda.memory_allocated() - before
    for name, t in tensors.items():
        if t.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() != held.read(name):
            print(name, "has other bytes"), sys.exit(1)
    print(len(tensors), "tensors,", taken, "bytes taken, torch", torch.__version__)
    del t, tensors
`

func (r *report) byTorch(ctx context.Context, kind string, h holder) error {
	name := kind + ": torch"
	if _, err := os.Stat(r.Client); err != nil || r.Python == "" {
		return r.leave(name, "no python3, or no "+r.Client)
	}
	cmd := bound(ctx, r.Python, "-c", torchScript, filepath.Dir(r.Client), h.Aggregate.String(), h.Socket)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 9 {
		return r.leave(name, lastLine(string(out)))
	}
	return r.need(name, "the same bytes", err == nil, "%s", lastLine(string(out)))
}

// taken reports what opening the blocks took of the device. The driver may take something for a stream, but no copy of
// the weights.
func (r *report) taken(name string, f found) error {
	return errors.Join(
		r.goal(name+": more device memory", "0 bytes", f.Taken <= 0, "%d bytes", f.Taken),
		r.need(name+": no copy of the weights", "less than a tenth", f.Taken < r.Small/10, "%.4f of their size",
			float64(f.Taken)/float64(r.Small)))
}

// compare reports whether the bytes are those of the small model.
func (r *report) compare(name string, f found) error {
	same := len(f.SHA256) == len(r.SmallShards)
	for i := 0; same && i < len(f.SHA256); i++ {
		same = f.SHA256[i] == r.SmallShards[i].SHA256
	}
	return r.need(name+": digests in another process", "as on the disk", same, "%d blocks", len(f.SHA256))
}

// attachBlocks is the process that attaches to the holder of which stdin tells.
func attachBlocks(ctx context.Context, c config, stdout io.Writer) (err error) {
	var h holder
	if err := json.NewDecoder(os.Stdin).Decode(&h); err != nil {
		return err
	}
	d, err := openDriver(c.Device)
	if err != nil {
		return err
	}
	start := time.Now()
	at, err := kiln.Client{Socket: h.Socket}.Attach(ctx, h.Aggregate)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, at.Close()) }()
	asked := time.Since(start)
	var o offer
	for _, b := range at.Blocks {
		o.UUID, o.Blocks = b.Device.UUID, append(o.Blocks, b.Handle)
	}
	f, opened, err := open(d, o)
	if err == nil {
		f.Seconds += asked.Seconds()
		f.SHA256, err = digests(opened, o)
	}
	if err = errors.Join(err, closeAll(opened)); err == nil {
		err = d.close()
	}
	if err != nil {
		return err
	}
	return json.NewEncoder(stdout).Encode(f)
}

// open opens the blocks and measures it.
func open(d *driver, o offer) (f found, opened []*cuda.Imported, err error) {
	before, err := d.used()
	if err != nil {
		return f, nil, err
	}
	start := time.Now()
	f.ReadOnly = true
	for _, h := range o.Blocks {
		m, err := cuda.Import(o.UUID, h)
		if err != nil {
			return f, opened, err
		}
		opened, f.ReadOnly = append(opened, m), f.ReadOnly && m.ReadOnly()
	}
	f.Seconds = time.Since(start).Seconds()
	after, err := d.used()
	f.Taken = int64(after) - int64(before)
	return f, opened, err
}

func digests(blocks []*cuda.Imported, o offer) (list []string, err error) {
	buf, err := hostMemory(4 << 20)
	if err != nil {
		return nil, err
	}
	for i, m := range blocks {
		h := sha256.New()
		// Not io.Copy: it would take a buffer of its own size.
		for off, n := int64(0), o.Blocks[i].Size; off < n; off += int64(len(buf)) {
			k, err := m.ReadAt(buf[:min(int64(len(buf)), n-off)], off)
			if err != nil {
				return nil, err
			}
			h.Write(buf[:k])
		}
		list = append(list, hex.EncodeToString(h.Sum(nil)))
	}
	return list, nil
}

func closeAll(blocks []*cuda.Imported) (err error) {
	for _, m := range blocks {
		err = errors.Join(err, m.Close())
	}
	return err
}

// descriptors opens here what another process published, while that lives and after it was killed.
func descriptors(ctx context.Context, r *report) (err error) {
	t, err := cuda.OpenShared(cuda.KindVMM, r.Device)
	if errors.Is(err, errors.ErrUnsupported) {
		return r.leave("vmm-fd", err)
	}
	if err == nil {
		err = t.Free()
	}
	if err != nil {
		return err
	}
	d, err := openDriver(r.Device)
	if err != nil {
		return err
	}
	o, kill, err := exported(ctx, r.config)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, kill()) }()
	f, opened, err := open(d, o)
	if err == nil {
		f.SHA256, err = digests(opened, o)
	}
	if err != nil {
		return errors.Join(err, closeAll(opened))
	}
	if err := errors.Join(r.compare("vmm-fd, sent by hand", f), r.taken("vmm-fd, sent by hand", f)); err != nil {
		return err
	}
	if err := kill(); err != nil {
		return err
	}
	f.SHA256, err = digests(opened, o)
	if err := errors.Join(err, closeAll(opened), r.compare("vmm-fd, its maker killed", f)); err != nil {
		return err
	}
	_, opened, err = open(d, o)
	if err == nil {
		f.SHA256, err = digests(opened, o)
	}
	return errors.Join(err, closeAll(opened), r.compare("vmm-fd, opened again after that", f), d.close())
}

// exported starts a process that publishes the small model, and returns its blocks with descriptors that it sent.
func exported(ctx context.Context, c config) (o offer, kill func() error, err error) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return o, nil, err
	}
	theirs := os.NewFile(uintptr(pair[1]), "theirs")
	defer theirs.Close()
	defer unix.Close(pair[0])
	cmd, err := again(ctx, "export", c)
	if err != nil {
		return o, nil, err
	}
	var stderr bytes.Buffer
	cmd.ExtraFiles, cmd.Stderr = []*os.File{theirs}, &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return o, nil, err
	}
	hold, err := cmd.StdinPipe()
	if err != nil {
		return o, nil, err
	}
	if err := cmd.Start(); err != nil {
		return o, nil, err
	}
	kill = func() error {
		if cmd.ProcessState != nil {
			return nil
		}
		err := errors.Join(cmd.Process.Kill(), hold.Close())
		_ = cmd.Wait() // it was killed
		return err
	}
	if err = json.NewDecoder(out).Decode(&o); err == nil {
		err = receive(pair[0], o.Blocks)
	}
	if err != nil {
		return o, nil, errors.Join(fmt.Errorf("%w: %s", err, lastLine(stderr.String())), kill())
	}
	return o, kill, nil
}

// exportBlocks is the process that publishes. It ends when its stdin does.
func exportBlocks(ctx context.Context, c config, stdout io.Writer) error {
	t, err := cuda.OpenShared(cuda.KindVMM, c.Device)
	if err != nil {
		return err
	}
	devices, err := t.Devices(ctx)
	if err != nil {
		return errors.Join(err, t.Free())
	}
	w, err := verified(ctx, c.Shm, c.SmallShards, t, gpuload.Options{})
	if err != nil {
		return err
	}
	handles, release, err := w.Lease()
	if err != nil {
		return err
	}
	defer w.Close(ctx)
	defer release()
	o := offer{UUID: devices[0].UUID, Loaded: w.Stats().Elapsed}
	for _, h := range handles {
		if err := unix.Sendmsg(3, []byte("f"), unix.UnixRights(int(h.File.Fd())), nil, 0); err != nil {
			return err
		}
		h.File = nil
		o.Blocks = append(o.Blocks, h)
	}
	if err := json.NewEncoder(stdout).Encode(o); err != nil {
		return err
	}
	_, err = io.Copy(io.Discard, os.Stdin)
	return err
}

// receive takes a descriptor for each block from a socket.
func receive(socket int, blocks []gpuload.Handle) error {
	for i := range blocks {
		b, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(4))
		_, n, _, _, err := unix.Recvmsg(socket, b, oob, unix.MSG_CMSG_CLOEXEC)
		if err != nil {
			return err
		}
		messages, err := unix.ParseSocketControlMessage(oob[:n])
		if err != nil || len(messages) != 1 {
			return fmt.Errorf("descriptor %d did not come: %w", i, err)
		}
		fds, err := unix.ParseUnixRights(&messages[0])
		if err != nil {
			return err
		}
		blocks[i].File = os.NewFile(uintptr(fds[0]), "block")
	}
	return nil
}
