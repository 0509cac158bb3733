//go:build !chaos

package durable

func (d Disk) faults() func(op Op, path string, do func() error) error { return d.Fault }
