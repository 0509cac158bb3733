package main

import (
	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

var zmm = []reg.VecPhysical{
	reg.Z0, reg.Z1, reg.Z2, reg.Z3, reg.Z4, reg.Z5, reg.Z6, reg.Z7, reg.Z8, reg.Z9, reg.Z10, reg.Z11, reg.Z12, reg.Z13,
	reg.Z14, reg.Z15, reg.Z16, reg.Z17, reg.Z18, reg.Z19, reg.Z20, reg.Z21, reg.Z22, reg.Z23, reg.Z24, reg.Z25,
	reg.Z26, reg.Z27, reg.Z28, reg.Z29, reg.Z30, reg.Z31,
}

// avx512 is the kernel over sixteen streams. Register i of the state holds word i of every stream, and so do the
// sixteen registers of the message schedule; nothing spills.
type avx512 struct {
	*build.Context
	k, flip Mem
	states  reg.GPPhysical
	v       [8]reg.VecPhysical  // the state: a to h
	w       [16]reg.VecPhysical // the schedule
	free    []reg.VecPhysical
}

func avx512File(c *build.Context) {
	a := &avx512{Context: c}
	a.k = global(c, "avxK")
	for _, v := range k {
		c.AppendDatum(U32(v))
	}
	a.flip = global(c, "avxFlip")
	for range 4 {
		c.AppendDatum(U64(0x0405060700010203))
		c.AppendDatum(U64(0x0c0d0e0f08090a0b))
	}
	copy(a.v[:], zmm[:8])
	copy(a.w[:], zmm[8:24])
	a.free = append(a.free, zmm[24:]...)
	a.function()
}

func (a *avx512) function() {
	a.Function("avx512X16")
	a.Attributes(attr.NOSPLIT)
	a.Doc("avx512X16 takes the states of sixteen streams through the next n blocks of 64 bytes at their pointers.",
		"state[i][j] is word i of stream j.")
	a.Pragma("noescape")
	a.SignatureExpr("func(state *[8][16]uint32, p *[16]*byte, n int)")
	a.states = a.Load(a.Param("state"), reg.RDI).(reg.GPPhysical)
	p := a.Load(a.Param("p"), reg.RSI).(reg.GPPhysical)
	blocks := a.Load(a.Param("n"), reg.RCX).(reg.GPPhysical)
	a.LEAQ(a.k, reg.RDX)
	a.k = Mem{Base: reg.RDX}
	a.TESTQ(blocks, blocks)
	a.JLE(LabelRef("done"))
	a.XORQ(reg.RBX, reg.RBX) // where the block begins
	for i, v := range a.v {
		a.VMOVDQU32(a.state(i), v)
	}
	a.Label("loop")
	a.read(p, reg.RBX)
	for t := range 64 {
		a.round(t)
		if t < 48 {
			a.extend(t)
		}
	}
	for i, v := range a.v {
		a.VPADDD(a.state(i), v, v)
		a.VMOVDQU32(v, a.state(i))
	}
	a.ADDQ(Imm(64), reg.RBX)
	a.DECQ(blocks)
	a.JNE(LabelRef("loop"))
	a.VZEROUPPER()
	a.Label("done")
	a.RET()
}

func (a *avx512) state(i int) Mem { return Mem{Base: a.states, Disp: 64 * i} }

func (a *avx512) take() reg.VecPhysical {
	z := a.free[0]
	a.free = a.free[1:]
	return z
}

func (a *avx512) give(zs ...reg.VecPhysical) { a.free = append(a.free, zs...) }

// read loads a block of every stream and turns rows into columns, so that w[i] is word i of every stream.
func (a *avx512) read(p, at reg.GPPhysical) {
	flip := a.take()
	a.VMOVDQU32(a.flip, flip)
	for i, w := range a.w {
		lane := []reg.GPPhysical{reg.R8, reg.R9, reg.R10, reg.R11}[i%4]
		a.MOVQ(Mem{Base: p, Disp: 8 * i}, lane)
		a.VMOVDQU32(Mem{Base: lane, Index: at, Scale: 1}, w)
		a.VPSHUFB(flip, w, w)
	}
	a.give(flip)
	for i := 0; i < 16; i += 2 {
		a.pair(i, i+1, func(x, y, lo, hi Op) { a.VPUNPCKLDQ(y, x, lo); a.VPUNPCKHDQ(y, x, hi) })
	}
	for _, i := range []int{0, 1, 4, 5, 8, 9, 12, 13} {
		a.pair(i, i+2, func(x, y, lo, hi Op) { a.VPUNPCKLQDQ(y, x, lo); a.VPUNPCKHQDQ(y, x, hi) })
	}
	// Row 4g+r holds, in each quarter c, words 4c+order[r] of the streams 4g to 4g+3.
	shuffle := func(x, y, lo, hi Op) { a.VSHUFI32X4(Imm(0x88), y, x, lo); a.VSHUFI32X4(Imm(0xdd), y, x, hi) }
	for _, i := range []int{0, 1, 2, 3, 8, 9, 10, 11} {
		a.pair(i, i+4, shuffle)
	}
	for i := range 8 {
		a.pair(i, i+8, shuffle)
	}
	// Row r holds quarters 0, row 4+r quarters 1, row 8+r quarters 2 and row 12+r quarters 3, with r as order says.
	var w [16]reg.VecPhysical
	for r, word := range []int{0, 2, 1, 3} {
		for c, row := range []int{0, 4, 8, 12} {
			w[4*c+word] = a.w[row+r]
		}
	}
	a.w = w
}

// pair replaces the rows i and j by lo and hi of them.
func (a *avx512) pair(i, j int, do func(x, y, lo, hi Op)) {
	t := a.take()
	do(a.w[i], a.w[j], t, a.w[j])
	a.give(a.w[i])
	a.w[i] = t
}

// round is round t of every stream.
func (a *avx512) round(t int) {
	v := a.v
	va, vb, vc, vd, ve, vf, vg, vh := v[0], v[1], v[2], v[3], v[4], v[5], v[6], v[7]
	w := a.w[t%16]
	x, y, z := a.take(), a.take(), a.take()
	// h += K + W + Ch(e, f, g)
	a.VPADDD_BCST(a.k.Offset(4*t), w, x)
	a.VPADDD(x, vh, vh)
	a.VMOVDQA32(ve, y)
	a.VPTERNLOGD(Imm(0xca), vg, vf, y)
	a.VPADDD(y, vh, vh)
	// x = S1(e)
	a.VPRORD(Imm(6), ve, x)
	a.VPRORD(Imm(11), ve, y)
	a.VPRORD(Imm(25), ve, z)
	a.VPTERNLOGD(Imm(0x96), z, y, x)
	// d += h + x: the new e
	a.VPADDD(vh, vd, vd)
	a.VPADDD(x, vh, vh)
	a.VPADDD(x, vd, vd)
	// h += S0(a) + Maj(a, b, c): the new a
	a.VPRORD(Imm(2), va, x)
	a.VPRORD(Imm(13), va, y)
	a.VPRORD(Imm(22), va, z)
	a.VPTERNLOGD(Imm(0x96), z, y, x)
	a.VMOVDQA32(va, y)
	a.VPTERNLOGD(Imm(0xe8), vc, vb, y)
	a.VPADDD(y, vh, vh)
	a.VPADDD(x, vh, vh)
	a.give(x, y, z)
	a.v = [8]reg.VecPhysical{vh, va, vb, vc, vd, ve, vf, vg}
}

// extend replaces word t of the schedule by word t+16.
func (a *avx512) extend(t int) {
	w := a.w[t%16]
	x, y, z := a.take(), a.take(), a.take()
	a.VPADDD(a.w[(t+9)%16], w, w)
	a.sigma(7, 18, 3, a.w[(t+1)%16], x, y, z)
	a.VPADDD(x, w, w)
	a.sigma(17, 19, 10, a.w[(t+14)%16], x, y, z)
	a.VPADDD(x, w, w)
	a.give(x, y, z)
}

// sigma is x = v rotated by r1, xor v rotated by r2, xor v shifted by s.
func (a *avx512) sigma(r1, r2, s int, v, x, y, z reg.VecPhysical) {
	a.VPRORD(U8(r1), v, x)
	a.VPRORD(U8(r2), v, y)
	a.VPSRLD(U8(s), v, z)
	a.VPTERNLOGD(U8(0x96), z, y, x)
}
