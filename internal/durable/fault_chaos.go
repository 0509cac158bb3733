//go:build chaos

package durable

// FaultAll, if set, is the Fault of every Disk that has none of its own. It is set before the first change, and only in
// programs that are built to be broken on purpose, with the tag chaos.
var FaultAll func(op Op, path string, do func() error) error

func (d Disk) faults() func(op Op, path string, do func() error) error {
	if d.Fault == nil {
		return FaultAll
	}
	return d.Fault
}
