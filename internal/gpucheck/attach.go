package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
)

//go:embed reader.py
var readerPy string

// offer is what another process is told about blocks. Descriptors come by themselves, in order, over descriptor 3.
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
	Torch    string // what torch read; empty: it is not installed; else why not, or ok
}

// attach lets other processes open what this one loaded.
func attach(ctx context.Context, r *report) error {
	t, err := cuda.Open(r.Device)
	if err != nil {
		return err
	}
	devices, err := t.Devices(ctx)
	if err != nil {
		return errors.Join(err, t.Free())
	}
	w, err := verified(ctx, r.Shm, r.SmallShards, t, gpuload.Options{})
	if err != nil {
		return err
	}
	defer w.Close(ctx)
	handles, release, err := w.Lease()
	if err != nil {
		return err
	}
	defer release()
	told, err := json.Marshal(offer{devices[0].UUID, handles, w.Stats().Elapsed})
	if err != nil {
		return err
	}
	cmd, err := again(ctx, "read", r.config)
	if err != nil {
		return err
	}
	if err = r.opened("cuda-ipc", cmd, told, w.Stats().Elapsed); err != nil {
		return err
	}
	if r.Python == "" {
		return errors.Join(r.leave("cuda-ipc, Python", "there is no python3"), w.Close(ctx))
	}
	cmd = exec.CommandContext(ctx, r.Python, "-c", readerPy)
	cmd.WaitDelay = 5 * time.Second
	return r.opened("cuda-ipc, Python", cmd, told, w.Stats().Elapsed)
}

// opened runs a process that opens the blocks, and reports what it found.
func (r *report) opened(name string, cmd *exec.Cmd, told []byte, loaded time.Duration) error {
	var stderr bytes.Buffer
	cmd.Stdin, cmd.Stderr = bytes.NewReader(told), &stderr
	out, err := cmd.Output()
	var f found
	if err == nil {
		err = json.Unmarshal(out, &f)
	}
	if err != nil {
		return r.need(name+": another process opens the blocks", "an answer", false, "%v: %s", err, lastLine(stderr.String()))
	}
	err = r.compare(name, f)
	ratio := f.Seconds / loaded.Seconds()
	err = errors.Join(err,
		r.figure(name+": open", "%d blocks in %.1f ms", len(f.SHA256), f.Seconds*1e3),
		r.goal(name+": open / load, in time", "≤ 1/100", ratio <= 0.01, "1/%.0f", 1/ratio),
		r.taken(name, f))
	switch f.Torch {
	case "":
	case "ok":
		err = errors.Join(err, r.need(name+": torch reads the same", "the digests", true, "%d blocks", len(f.SHA256)))
	default:
		err = errors.Join(err, r.leave(name+": torch", f.Torch))
	}
	return err
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

// readBlocks is the other process: it opens the blocks of which stdin tells.
func readBlocks(_ context.Context, c config, stdout io.Writer) error {
	var o offer
	if err := json.NewDecoder(os.Stdin).Decode(&o); err != nil {
		return err
	}
	d, err := openDriver(c.Device)
	if err != nil {
		return err
	}
	f, opened, err := open(d, o)
	if err == nil {
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
	ratio := f.Seconds / o.Loaded.Seconds()
	if err := errors.Join(r.compare("vmm-fd", f),
		r.figure("vmm-fd: open", "%d blocks in %.1f ms", len(opened), f.Seconds*1e3),
		r.goal("vmm-fd: open / load, in time", "≤ 1/100", ratio <= 0.01, "1/%.0f", 1/ratio),
		r.taken("vmm-fd", f),
		r.figure("vmm-fd: mapped only for reading", "%v", f.ReadOnly)); err != nil {
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
