package rig

import (
	"fmt"
	"slices"
)

// Side is one of several works that are measured in turns.
type Side struct {
	Name string
	Work func(round int) (Cost, error)
}

// Round is what each side took, by name.
type Round map[string]Cost

// Rounds are what the sides took, one round after the other.
type Rounds []Round

// Turns runs every side once in each round; which one goes first changes from round to round. Round 0 comes before
// those that count: it fills caches.
func Turns(rounds int, sides ...Side) (Rounds, error) {
	var all Rounds
	for i := range rounds + 1 {
		r := Round{}
		for turn := range sides {
			s := sides[(i+turn)%len(sides)]
			c, err := s.Work(i)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", s.Name, err)
			}
			r[s.Name] = c
		}
		if i > 0 {
			all = append(all, r)
		}
	}
	return all, nil
}

// Spread is the middle of the rounds, and what lies around it.
type Spread struct{ Median, Low, High float64 }

// Each takes a number from every round.
func (rs Rounds) Each(of func(Round) float64) Spread {
	vs := make([]float64, len(rs))
	for i, r := range rs {
		vs[i] = of(r)
	}
	slices.Sort(vs)
	return Spread{vs[len(vs)/2], vs[0], vs[len(vs)-1]}
}

// CPU is the processor seconds of a side.
func (rs Rounds) CPU(side string) Spread {
	return rs.Each(func(r Round) float64 { return r[side].CPU })
}

// Wall is the seconds of a side.
func (rs Rounds) Wall(side string) Spread {
	return rs.Each(func(r Round) float64 { return r[side].Wall })
}

// CPURatio is the processor time of a side beside that of another, in the same round.
func (rs Rounds) CPURatio(side, other string) Spread {
	return rs.Each(func(r Round) float64 { return r[side].CPU / r[other].CPU })
}

// WallRatio is the wall time of a side beside that of another, in the same round.
func (rs Rounds) WallRatio(side, other string) Spread {
	return rs.Each(func(r Round) float64 { return r[side].Wall / r[other].Wall })
}

// String is the lowest and the highest.
func (s Spread) String() string { return fmt.Sprintf("%.3g to %.3g", s.Low, s.High) }
