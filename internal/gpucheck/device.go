package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"strings"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/cuda"
)

// bind says what there is.
func bind(ctx context.Context, r *report) error {
	d, err := openDriver(r.Device)
	if err != nil {
		return err
	}
	var version, n, vmm, fd int32
	name := make([]byte, 256)
	uuid, err := d.uuidText()
	if err := errors.Join(err,
		d.check("cuDriverGetVersion", d.version(&version)), d.check("cuDeviceGetCount", d.count(&n)),
		d.check("cuDeviceGetName", d.name(name, int32(len(name)), d.device))); err != nil {
		return err
	}
	var free, total uint64
	// 102 and 103 are the attributes that gpuload/cuda asks for.
	if err := errors.Join(d.check("cuDeviceGetAttribute", d.attribute(&vmm, 102, d.device)),
		d.check("cuDeviceGetAttribute", d.attribute(&fd, 103, d.device)),
		d.check("cuMemGetInfo", d.memory(&free, &total))); err != nil {
		return err
	}
	target, err := cuda.Open(r.Device)
	if err != nil {
		return err
	}
	devices, err := target.Devices(ctx)
	if err = errors.Join(err, target.Free()); err != nil {
		return err
	}
	kernel := kernelDriver(ctx)
	return errors.Join(
		r.figure("driver", "CUDA %d.%d, %d devices%s", version/1000, version%1000/10, n, kernel),
		r.figure("device", "%s, %.1f of %.1f GB free", bytes.TrimRight(name, "\x00"), float64(free)/1e9, float64(total)/1e9),
		r.figure("memory management, descriptors", "%d, %d", vmm, fd),
		r.need("gpuload/cuda opens the device", "the same UUID", devices[0].UUID == uuid, "%s", devices[0].Name),
		d.close(),
	)
}

// kernelDriver is the version of the kernel's driver, empty where nobody can be asked.
func kernelDriver(ctx context.Context) string {
	out, err := exec.CommandContext(ctx, "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").Output()
	if err != nil {
		return ""
	}
	version, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return ", driver " + version
}

// allocation takes blocks of several sizes, one beside the other.
func allocation(_ context.Context, r *report) error {
	d, err := openDriver(r.Device)
	if err != nil {
		return err
	}
	before, err := d.used()
	if err != nil {
		return err
	}
	var blocks []uint64
	align, asked, overhead := uint64(1<<40), int64(0), int64(0)
	for _, n := range r.Allocs {
		var p uint64
		if err := d.check(fmt.Sprint("cuMemAlloc of ", n), d.alloc(&p, uint64(n))); err != nil {
			return err
		}
		blocks, asked, align = append(blocks, p), asked+n, min(align, p&-p)
		now, err := d.used()
		if err != nil {
			return err
		}
		overhead = max(overhead, int64(now)-int64(before)-asked)
	}
	shared, err := d.shared()
	for _, p := range blocks {
		err = errors.Join(err, d.check("cuMemFree", d.free(p)))
	}
	after, e := d.used()
	if err := errors.Join(err, e); err != nil {
		return err
	}
	return errors.Join(
		r.need("alignment of allocations", "≥ 512 bytes", align >= 512, "%d KiB, %d sizes", align>>10, len(blocks)),
		r.figure("memory taken beyond what was asked", "%d KiB", overhead>>10),
		r.figure("allocations of 4 KiB", "%s", shared),
		r.given("memory after freeing", before, after),
		d.close(),
	)
}

// slack is what the driver may keep for itself of what was given back, in bytes.
const slack = 32 << 20

// given reports whether all memory was given back.
func (r *report) given(name string, before, after uint64) error {
	return r.need(name, "as before", after <= before+slack, "%d bytes more", int64(after)-int64(before))
}

// shared says whether two small allocations lie in one block of 2 MiB, and so behind one handle.
func (d *driver) shared() (string, error) {
	var a, b uint64
	handles := [2][]byte{make([]byte, 64), make([]byte, 64)}
	err := errors.Join(d.check("cuMemAlloc", d.alloc(&a, 4096)), d.check("cuMemAlloc", d.alloc(&b, 4096)),
		d.check("cuIpcGetMemHandle", d.export(handles[0], a)), d.check("cuIpcGetMemHandle", d.export(handles[1], b)),
		d.check("cuMemFree", d.free(a)), d.check("cuMemFree", d.free(b)))
	text := "each in a block of its own"
	if a>>21 == b>>21 {
		text = "share a block of 2 MiB"
	}
	if bytes.Equal(handles[0], handles[1]) {
		text += ", behind the same handle"
	}
	return text, err
}

// outOfMemory takes more than there is, at once and piece by piece, and then nothing more is held than before.
func outOfMemory(ctx context.Context, r *report) error {
	d, err := openDriver(r.Device)
	if err != nil {
		return err
	}
	before, err := d.used()
	var free, total uint64
	if err := errors.Join(err, d.check("cuMemGetInfo", d.memory(&free, &total))); err != nil {
		return err
	}
	target, err := cuda.Open(r.Device)
	if err != nil {
		return err
	}
	_, whole := target.Alloc(ctx, r.Device, int64(free)+1<<30)
	pieces, piece := 0, int64(free/8)
	for err = nil; err == nil && pieces < 16; pieces++ {
		_, err = target.Alloc(ctx, r.Device, piece)
	}
	freed := target.Free()
	after, e := d.used()
	if e := errors.Join(freed, e); e != nil {
		return e
	}
	return errors.Join(
		r.need("more memory than there is", "gpuload.ErrMemory", errors.Is(whole, gpuload.ErrMemory), "%s", text(whole)),
		r.need("memory until it runs out", "gpuload.ErrMemory", errors.Is(err, gpuload.ErrMemory),
			"after %d eighths: %s", pieces-1, text(err)),
		r.given("memory after it ran out", before, after),
		d.close(),
	)
}

// text is an error from the name of the driver's call on.
func text(err error) string {
	var e *cuda.Error
	if errors.As(err, &e) {
		return e.Error()
	}
	return fmt.Sprint(err)
}

// wrongCalls makes mistakes that a driver answers without harm, and compares its codes with those of the stand-in.
func wrongCalls(ctx context.Context, r *report) error {
	d, err := openDriver(r.Device)
	if err != nil {
		return err
	}
	buf, err := hostMemory(2 << 20)
	if err != nil {
		return err
	}
	var p uint64
	var index int32
	if err := errors.Join(d.check("cuMemAlloc", d.alloc(&p, 2<<20)),
		d.check("cuMemHostRegister", d.pin(buf, uint64(len(buf)), 1))); err != nil {
		return err
	}
	for _, c := range []struct {
		what string
		want code
		call func() code
	}{
		{"cuMemAlloc of 0 bytes", 1, func() code { var q uint64; return d.alloc(&q, 0) }},
		{"cuMemFree inside a block", 1, func() code { return d.free(p + 512) }},
		{"cuDeviceGet of index 99", 101, func() code { return d.get(&index, 99) }},
		{"cuMemHostRegister a second time", 712, func() code { return d.pin(buf, uint64(len(buf)), 1) }},
		{"cuMemHostUnregister of other memory", 713, func() code { return d.unpin(make([]byte, 4096)) }},
		{"cuStreamCreate with unknown flags", 1, func() code { var s uintptr; return d.newStream(&s, 1<<20) }},
	} {
		if err := r.code(d, c.what, c.want, c.call()); err != nil {
			return err
		}
	}
	err = d.check("cuCtxSetCurrent", d.setCurrent(0))
	var q uint64
	got := d.alloc(&q, 4096)
	return errors.Join(err, d.check("cuCtxSetCurrent", d.setCurrent(d.context)),
		r.code(d, "cuMemAlloc without a context", 201, got), r.opensItsOwn(ctx, d),
		d.check("cuMemHostUnregister", d.unpin(buf)), d.check("cuMemFree", d.free(p)), d.close())
}

// code reports what the driver answered.
func (r *report) code(d *driver, what string, want, got code) error {
	return r.goal("error: "+what, fmt.Sprint(int(want)), got == want, "%d %s", int(got), d.text(d.errorName, got))
}

// opensItsOwn opens a handle in the process that made it.
func (r *report) opensItsOwn(ctx context.Context, d *driver) error {
	target, err := cuda.Open(r.Device)
	if err != nil {
		return err
	}
	defer target.Free()
	if _, err = target.Alloc(ctx, r.Device, 4096); err != nil {
		return err
	}
	handles, err := target.Publish(ctx)
	if err != nil {
		return err
	}
	uuid, err := d.uuidText()
	if err != nil {
		return err
	}
	m, err := cuda.Import(uuid, handles[0])
	if err == nil {
		err = m.Close()
	}
	var e *cuda.Error
	if !errors.As(err, &e) {
		e = new(cuda.Error)
	}
	return errors.Join(r.code(d, "cuIpcOpenMemHandle in the same process", 201, code(e.Code)), target.Free())
}
