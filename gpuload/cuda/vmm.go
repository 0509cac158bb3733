//go:build linux && (amd64 || arm64) && !nogpu

package cuda

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"unsafe"
)

// Values of cuda.h, since CUDA 10.2.
const (
	attributeVMM    = 102 // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
	attributeFD     = 103 // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
	memPinned       = 1   // CU_MEM_ALLOCATION_TYPE_PINNED
	memOnDevice     = 1   // CU_MEM_LOCATION_TYPE_DEVICE
	handleFD        = 1   // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
	accessRead      = 1   // CU_MEM_ACCESS_FLAGS_PROT_READ
	accessReadWrite = 3   // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
	granularityMin  = 0   // CU_MEM_ALLOC_GRANULARITY_MINIMUM
)

const callSetAccess = "cuMemSetAccess"

// memLocation, memProp and memAccess are CUmemLocation, CUmemAllocationProp and CUmemAccessDesc of cuda.h.
type memLocation struct{ kind, id int32 }

type memProp struct {
	kind, handles     int32
	location          memLocation
	win32             uintptr
	compression, rdma byte
	usage             uint16
	_                 [4]byte
}

type memAccess struct {
	location memLocation
	flags    int32
}

// vmmTable holds the entry points by which memory and its address are had apart. All are optional.
type vmmTable struct {
	attribute, granularity              uintptr
	create, release                     uintptr
	reserve, unreserve, mapTo, unmap    uintptr
	setAccess, exportShared, openShared uintptr
}

func (t *vmmTable) entries() []entry {
	may := func(at *uintptr, name string) entry { return entry{at, true, []string{name}} }
	return []entry{
		may(&t.attribute, "cuDeviceGetAttribute"), may(&t.granularity, "cuMemGetAllocationGranularity"),
		may(&t.create, "cuMemCreate"), may(&t.release, "cuMemRelease"),
		may(&t.reserve, "cuMemAddressReserve"), may(&t.unreserve, "cuMemAddressFree"),
		may(&t.mapTo, "cuMemMap"), may(&t.unmap, "cuMemUnmap"), may(&t.setAccess, callSetAccess),
		may(&t.exportShared, "cuMemExportToShareableHandle"),
		may(&t.openShared, "cuMemImportFromShareableHandle"),
	}
}

// canVMM fails with what the driver or the device lacks for memory that is shared as a file descriptor.
func (d *device) canVMM() error {
	for _, e := range d.vmm.entries() {
		if *e.at == 0 {
			return fmt.Errorf("%s: the driver library has no %s: %w", KindVMM, e.names[0], errors.ErrUnsupported)
		}
	}
	for _, a := range []struct {
		number uintptr
		name   string
	}{
		{attributeVMM, "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"},
		{attributeFD, "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED"},
	} {
		v, err := out[int32](d.table, "cuDeviceGetAttribute", d.vmm.attribute, a.number, uintptr(d.id))
		if err != nil {
			return err
		}
		if v == 0 {
			return fmt.Errorf("%s: the device has %s = 0: %w", KindVMM, a.name, errors.ErrUnsupported)
		}
	}
	return nil
}

func (d *device) location() memLocation { return memLocation{memOnDevice, d.id} }

func (d *device) prop() *memProp {
	return &memProp{kind: memPinned, handles: handleFD, location: d.location()}
}

// useVMM makes the device take memory that can be shared as a file descriptor.
func (d *device) useVMM() error {
	if err := d.canVMM(); err != nil {
		return err
	}
	n := new(uintptr)
	err := d.call("cuMemGetAllocationGranularity", d.vmm.granularity, uintptr(unsafe.Pointer(n)),
		uintptr(unsafe.Pointer(d.prop())), granularityMin)
	d.granularity = max(granularity, int64(*n))
	return err
}

// mapping is memory of a device at an address of this process. The zero mapping is none.
type mapping struct {
	ptr    uint64 // 0: it has no address yet
	size   uintptr
	handle uint64
	mapped bool
}

// create takes n bytes, a multiple of the granularity, for reading and writing. The context is current.
func (d *device) create(n int64) (mapping, error) {
	h := new(uint64)
	err := d.call("cuMemCreate", d.vmm.create, uintptr(unsafe.Pointer(h)), uintptr(n),
		uintptr(unsafe.Pointer(d.prop())), 0)
	if err != nil {
		return mapping{}, err
	}
	return d.place(mapping{handle: *h, size: uintptr(n)}, accessReadWrite)
}

// place maps memory and lets the device have it, and gives all back when it fails.
func (d *device) place(m mapping, access int32) (mapping, error) {
	at := new(uint64)
	err := d.call("cuMemAddressReserve", d.vmm.reserve, uintptr(unsafe.Pointer(at)), m.size, 0, 0, 0)
	if err == nil {
		m.ptr = *at
		err = d.call("cuMemMap", d.vmm.mapTo, uintptr(m.ptr), m.size, 0, uintptr(m.handle), 0)
	}
	if err == nil {
		m.mapped = true
		err = d.allow(m, access)
	}
	if err != nil {
		return mapping{}, errors.Join(err, d.drop(m))
	}
	return m, nil
}

// allow says what the device may do with a mapping.
func (d *device) allow(m mapping, access int32) error {
	desc := &memAccess{d.location(), access}
	return d.call(callSetAccess, d.vmm.setAccess, uintptr(m.ptr), m.size, uintptr(unsafe.Pointer(desc)), 1)
}

// drop gives memory and address back. Memory that another process has open stays there.
func (d *device) drop(m mapping) (err error) {
	if m.mapped {
		err = d.call("cuMemUnmap", d.vmm.unmap, uintptr(m.ptr), m.size)
	}
	if m.ptr != 0 {
		err = errors.Join(err, d.call("cuMemAddressFree", d.vmm.unreserve, uintptr(m.ptr), m.size))
	}
	if m.handle != 0 {
		err = errors.Join(err, d.call("cuMemRelease", d.vmm.release, uintptr(m.handle)))
	}
	return err
}

// export returns a descriptor of the memory, which programs that this one executes don't inherit.
func (d *device) export(m mapping) (*os.File, error) {
	fd := new(int32)
	err := d.call("cuMemExportToShareableHandle", d.vmm.exportShared, uintptr(unsafe.Pointer(fd)),
		uintptr(m.handle), handleFD, 0)
	if err != nil {
		return nil, err
	}
	syscall.CloseOnExec(int(*fd))
	return os.NewFile(uintptr(*fd), KindVMM), nil
}

// openShared maps the n bytes behind a descriptor for reading, or for reading and writing too where the driver refuses
// less. The descriptor stays with the caller.
func (d *device) openShared(f *os.File, n int64) (m mapping, readOnly bool, err error) {
	if m, err = d.openFor(f, n, accessRead); err == nil {
		return m, true, nil
	}
	var e *Error
	if errors.As(err, &e) && e.Call == callSetAccess {
		m, err = d.openFor(f, n, accessReadWrite)
	}
	return m, false, err
}

func (d *device) openFor(f *os.File, n int64, access int32) (mapping, error) {
	h := new(uint64)
	err := d.call("cuMemImportFromShareableHandle", d.vmm.openShared, uintptr(unsafe.Pointer(h)), f.Fd(), handleFD)
	if err != nil {
		return mapping{}, err
	}
	return d.place(mapping{handle: *h, size: uintptr(n)}, access)
}
