//go:build !amd64 || purego

package block

const hasSHANI, hasAVX512 = false, false

func (k Kernel) run([]State, [][]byte) { panic("block: no kernel for this processor") }
