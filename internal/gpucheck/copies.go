package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// usualChunk is the size of the copies of gpuload.
const usualChunk = 16 << 20

// copies measures plain copies: from memory that is pinned, by size, and from memory that is not.
func copies(_ context.Context, r *report) error {
	d, err := openDriver(r.Device)
	if err != nil {
		return err
	}
	buf, err := hostMemory(r.Buffer)
	if err != nil {
		return err
	}
	var p uint64
	if err := d.check("cuMemAlloc", d.alloc(&p, uint64(len(buf)))); err != nil {
		return err
	}
	usual := min(usualChunk, r.Buffer)
	plain, err := d.rate(buf, p, usual, r.Copy/4, d.toDeviceFrom)
	if err != nil {
		return err
	}
	start := time.Now()
	if err := d.check("cuMemHostRegister", d.pin(buf, uint64(len(buf)), 1)); err != nil {
		return err
	}
	pinning := time.Since(start)
	for _, chunk := range r.Chunks {
		rate, err := d.rate(buf, p, chunk, r.Copy, d.toDeviceFrom)
		if err == nil {
			err = r.figure(fmt.Sprintf("pinned memory to device, %d MiB a copy", chunk>>20), "%.2f GB/s", rate)
		}
		if err != nil {
			return err
		}
	}
	down, err := d.rate(buf, p, usual, r.Copy, d.toHostTo)
	if err != nil {
		return err
	}
	return errors.Join(
		r.figure(fmt.Sprintf("device to pinned memory, %d MiB a copy", usual>>20), "%.2f GB/s", down),
		r.figure(fmt.Sprintf("other memory to device, %d MiB a copy", usual>>20), "%.2f GB/s", plain),
		r.figure("cuMemHostRegister", "%.2f GB/s, %d MiB", gbps(int64(len(buf)), pinning), len(buf)>>20),
		d.check("cuMemHostUnregister", d.unpin(buf)), d.check("cuMemFree", d.free(p)), d.close(),
	)
}

func (d *driver) toDeviceFrom(buf []byte, p uint64) code {
	return d.toDevice(p, buf, uint64(len(buf)), d.stream)
}

func (d *driver) toHostTo(buf []byte, p uint64) code {
	return d.toHost(buf, p, uint64(len(buf)), d.stream)
}

// rate copies total bytes in pieces, one behind the other in a stream, and returns GB/s. A first piece is not counted.
func (d *driver) rate(buf []byte, p uint64, piece, total int64, move func([]byte, uint64) code) (float64, error) {
	if piece > int64(len(buf)) {
		return 0, fmt.Errorf("a copy of %d bytes from a buffer of %d", piece, len(buf))
	}
	var start time.Time
	for done, at := -piece, int64(0); done < total; done += piece {
		if done == 0 {
			if err := d.check("cuStreamSynchronize", d.sync(d.stream)); err != nil {
				return 0, err
			}
			start = time.Now()
		}
		if err := d.check("copy", move(buf[at:at+piece], p+uint64(at))); err != nil {
			return 0, err
		}
		if at += piece; at+piece > int64(len(buf)) {
			at = 0
		}
	}
	err := d.check("cuStreamSynchronize", d.sync(d.stream))
	return gbps((total+piece-1)/piece*piece, time.Since(start)), err
}

func gbps(n int64, d time.Duration) float64 { return float64(n) / 1e9 / max(d.Seconds(), 1e-9) }

// locking pins memory where the process may lock next to none.
func locking(_ context.Context, r *report) error {
	d, err := openDriver(r.Device)
	if err != nil {
		return err
	}
	const limit = 64 << 10
	name := fmt.Sprintf("pinning %d MiB, ulimit -l %d KiB", r.Buffer>>20, limit>>10)
	buf, err := hostMemory(r.Buffer)
	if err != nil {
		return err
	}
	if err := mayLock(limit); err != nil {
		return errors.Join(r.leave(name, err), d.close())
	}
	if err = d.check("cuMemHostRegister", d.pin(buf, uint64(len(buf)), 1)); err != nil {
		return errors.Join(r.figure(name, "refused: %v", err), d.close())
	}
	return errors.Join(r.figure(name, "pinned: the limit does not count"),
		d.check("cuMemHostUnregister", d.unpin(buf)), d.close())
}

// mayLock gives this thread a limit of locked memory, without the capability for which it does not count.
func mayLock(limit uint64) error {
	runtime.LockOSThread()
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&h, &data[0]); err != nil {
		return fmt.Errorf("read the capabilities: %w", err)
	}
	data[0].Effective &^= 1 << unix.CAP_IPC_LOCK
	if err := unix.Capset(&h, &data[0]); err != nil {
		return fmt.Errorf("drop CAP_IPC_LOCK: %w", err)
	}
	var now unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &now); err != nil {
		return err
	}
	return unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: min(limit, now.Max), Max: now.Max})
}
