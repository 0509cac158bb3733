package main

import (
	"fmt"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	. "github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/reg"
)

// shani writes a kernel of the SHA instructions over some streams.
//
// A stream's state is two registers, as SHA256RNDS2 wants it. That instruction takes twice as long as a core needs to
// start another one, so streams are interleaved by four rounds. SHA256RNDS2 has sixteen registers to choose from: two
// streams have their message schedules in registers too, more keep all but the last four words on the stack.
type shani struct {
	*build.Context
	streams int
	stack   Mem // aligned to 16 bytes
	k       Mem
	flip    Mem
	p       []reg.GPPhysical
	a, b    []reg.VecPhysical // the state: words a b e f and c d g h
	last    []reg.VecPhysical // the four words of the schedule that came last

	schedule [][4]reg.VecPhysical // the sixteen words, where nothing spills
	free     []reg.VecPhysical
}

var xmm = []reg.VecPhysical{
	reg.X0, reg.X1, reg.X2, reg.X3, reg.X4, reg.X5, reg.X6, reg.X7,
	reg.X8, reg.X9, reg.X10, reg.X11, reg.X12, reg.X13, reg.X14, reg.X15,
}

func shaniFile(c *build.Context) {
	k, flip := shaniConstants(c)
	for n := 2; n <= 4; n++ {
		s := &shani{Context: c, streams: n, k: k, flip: flip}
		s.function()
	}
}

func shaniConstants(c *build.Context) (rounds, flip Mem) {
	rounds = global(c, "niK")
	for _, v := range k {
		c.AppendDatum(U32(v))
	}
	flip = global(c, "niFlip")
	c.AppendDatum(U64(0x0405060700010203))
	c.AppendDatum(U64(0x0c0d0e0f08090a0b))
	return rounds, flip
}

func (s *shani) function() {
	n := s.streams
	s.Function(fmt.Sprintf("shaniX%d", n))
	s.Attributes(attr.NOSPLIT)
	s.Doc(fmt.Sprintf("shaniX%d takes the states of %d streams through the next n blocks of 64 bytes at their pointers.",
		n, n))
	s.Pragma("noescape")
	s.SignatureExpr(fmt.Sprintf("func(state *[%d][8]uint32, p *[%d]*byte, n int)", n, n))
	s.registers()
	states := s.Load(s.Param("state"), reg.RDI).(reg.GPPhysical)
	blocks := s.Load(s.Param("n"), reg.RCX).(reg.GPPhysical)
	s.Load(s.Param("p"), reg.RAX)
	for i := range n {
		s.MOVQ(Mem{Base: reg.RAX, Disp: 8 * i}, s.p[i])
	}
	s.LEAQ(s.AllocLocal(96*n+16), reg.RSI)
	s.ADDQ(Imm(15), reg.RSI)
	s.ANDQ(I32(-16), reg.RSI)
	s.stack = Mem{Base: reg.RSI}
	s.LEAQ(s.k, reg.RDX)
	s.k = Mem{Base: reg.RDX}
	done, loop := fmt.Sprintf("done%d", n), fmt.Sprintf("loop%d", n)
	s.TESTQ(blocks, blocks)
	s.JLE(LabelRef(done))
	s.enter(states)
	s.Label(loop)
	s.block()
	s.DECQ(blocks)
	s.JNE(LabelRef(loop))
	s.leave(states)
	s.Label(done)
	s.RET()
}

// registers gives each stream its registers. X0 is what SHA256RNDS2 adds.
func (s *shani) registers() {
	s.p = []reg.GPPhysical{reg.R8, reg.R9, reg.R10, reg.R11}[:s.streams]
	s.free = append([]reg.VecPhysical(nil), xmm[1:]...)
	for range s.streams {
		s.a, s.b = append(s.a, s.take()), append(s.b, s.take())
	}
	s.last = make([]reg.VecPhysical, s.streams)
	if s.spills() {
		for i := range s.last {
			s.last[i] = s.take()
		}
		return
	}
	s.schedule = make([][4]reg.VecPhysical, s.streams)
	for i := range s.schedule {
		for j := range s.schedule[i] {
			s.schedule[i][j] = s.take()
		}
	}
}

func (s *shani) take() reg.VecPhysical {
	x := s.free[0]
	s.free = s.free[1:]
	return x
}

func (s *shani) give(x reg.VecPhysical) { s.free = append(s.free, x) }

// word is where four words of the schedule of stream i lie, of step%4.
func (s *shani) word(i, step int) Mem { return s.stack.Offset(96*i + 16*(step%4)) }

// saved is where half of the state before the block lies.
func (s *shani) saved(i, half int) Mem { return s.stack.Offset(96*i + 64 + 16*half) }

// enter loads the states and orders their words as the SHA instructions want them.
func (s *shani) enter(states reg.GPPhysical) {
	t := s.take()
	for i := range s.streams {
		a, b := s.a[i], s.b[i]
		s.VMOVDQU(Mem{Base: states, Disp: 32 * i}, a)
		s.VMOVDQU(Mem{Base: states, Disp: 32*i + 16}, b)
		s.PSHUFD(Imm(0xb1), a, a)
		s.PSHUFD(Imm(0x1b), b, b)
		s.VMOVDQA(a, t)
		s.PALIGNR(Imm(8), b, a)
		s.PBLENDW(Imm(0xf0), t, b)
	}
	s.give(t)
}

func (s *shani) leave(states reg.GPPhysical) {
	t := s.take()
	for i := range s.streams {
		a, b := s.a[i], s.b[i]
		s.PSHUFD(Imm(0x1b), a, a)
		s.PSHUFD(Imm(0xb1), b, b)
		s.VMOVDQA(a, t)
		s.PBLENDW(Imm(0xf0), b, a)
		s.PALIGNR(Imm(8), t, b)
		s.VMOVDQU(a, Mem{Base: states, Disp: 32 * i})
		s.VMOVDQU(b, Mem{Base: states, Disp: 32*i + 16})
	}
	s.give(t)
}

// block hashes one block of every stream.
func (s *shani) block() {
	for i := range s.streams {
		s.VMOVDQA(s.a[i], s.saved(i, 0))
		s.VMOVDQA(s.b[i], s.saved(i, 1))
	}
	for i := range s.streams {
		if !s.spills() {
			s.words(i, 0)
		}
	}
	for step := range 16 {
		for i := range s.streams {
			s.rounds(i, step)
		}
	}
	for i := range s.streams {
		s.VPADDD(s.saved(i, 0), s.a[i], s.a[i])
		s.VPADDD(s.saved(i, 1), s.b[i], s.b[i])
		s.ADDQ(Imm(64), s.p[i])
	}
}

// words makes the four words of the schedule that step adds.
func (s *shani) words(i, step int) {
	switch {
	case step < 4:
		s.read(i, step)
	case step < 16:
		s.extend(i, step)
	}
}

// read takes four words of the message.
func (s *shani) read(i, step int) {
	w := s.fresh(i, step)
	s.VMOVDQU(Mem{Base: s.p[i], Disp: 16 * step}, w)
	s.PSHUFB(s.flip, w)
	s.keep(i, step, w)
}

// extend makes four words of the schedule of the sixteen before.
func (s *shani) extend(i, step int) {
	w, t := s.fresh(i, step), s.take()
	if s.spills() {
		s.VMOVDQA(s.word(i, step), w)
	}
	s.SHA256MSG1(s.old(i, step-3), w)
	s.VPALIGNR(Imm(4), s.old(i, step-2), s.last[i], t)
	s.VPADDD(t, w, w)
	s.SHA256MSG2(s.last[i], w)
	s.give(t)
	s.keep(i, step, w)
}

// spills: the schedules of two streams have room in registers.
func (s *shani) spills() bool { return s.streams > 2 }

// old is where the words of an earlier step are, of the last four.
func (s *shani) old(i, step int) Op {
	if s.spills() {
		return s.word(i, step)
	}
	return s.schedule[i][step%4]
}

// fresh is a register for the words of a step. Without spills it still holds those of four steps before.
func (s *shani) fresh(i, step int) reg.VecPhysical {
	if s.spills() {
		return s.take()
	}
	return s.schedule[i][step%4]
}

// keep makes w the last words.
func (s *shani) keep(i, step int, w reg.VecPhysical) {
	if s.spills() {
		if step < 15 {
			s.VMOVDQA(w, s.word(i, step))
		}
		s.give(s.last[i])
	}
	s.last[i] = w
}

// rounds are four rounds of the stream. Two streams are just enough to keep SHA256RNDS2 busy, so that nothing makes up
// for a schedule that is late: the words of their next step are made early, between the halves of this one, the second
// of which has to wait for the first anyway. With more streams it is better to make words right before they are used.
func (s *shani) rounds(i, step int) {
	if s.spills() {
		s.words(i, step)
	}
	s.VPADDD(s.k.Offset(16*step), s.last[i], reg.X0)
	s.SHA256RNDS2(reg.X0, s.a[i], s.b[i])
	s.PSHUFD(Imm(0x0e), reg.X0, reg.X0)
	if !s.spills() {
		s.words(i, step+1)
	}
	s.SHA256RNDS2(reg.X0, s.b[i], s.a[i])
}
