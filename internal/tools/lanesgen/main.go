// Command lanesgen writes the assembly of identity/lanes/block: SHA-256 over several streams at once on one core.
//
// Its one argument is the folder of that package. The same source always gives the same files.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/mmcloughlin/avo/attr"
	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/ir"
	"github.com/mmcloughlin/avo/operand"
	"github.com/mmcloughlin/avo/pass"
	"github.com/mmcloughlin/avo/printer"
)

const pkg = "github.com/kiln-registry/kiln-registry/identity/lanes/block"

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("want the folder of %s as the one argument", pkg)
	}
	for name, functions := range map[string]func(*build.Context){"shani": shaniFile, "avx512": avx512File} {
		if err := write(filepath.Join(args[0], name), functions); err != nil {
			return fmt.Errorf("generate %s: %w", name, err)
		}
	}
	return nil
}

// write writes path_amd64.s and the declarations of its functions, path_amd64.go.
func write(path string, functions func(*build.Context)) error {
	c := build.NewContext()
	c.ConstraintExpr("!purego")
	functions(c)
	f, err := c.Result()
	if err != nil {
		return err
	}
	if err := pass.Compile.Execute(f); err != nil {
		return err
	}
	cfg := printer.Config{Name: "internal/tools/lanesgen", Pkg: "block"}
	if err := print(path+"_amd64.s", printer.NewGoAsm(cfg), f); err != nil {
		return err
	}
	return print(path+"_amd64.go", printer.NewStubs(cfg), f)
}

// global begins a table of constants.
func global(c *build.Context, name string) operand.Mem {
	g := c.StaticGlobal(name)
	c.DataAttributes(attr.RODATA | attr.NOPTR)
	return g
}

func print(path string, p printer.Printer, f *ir.File) error {
	text, err := p.Print(f)
	if err != nil {
		return err
	}
	return os.WriteFile(path, text, 0o644)
}

// k are the round constants of SHA-256: the first 32 bits of the fractional parts of the cube roots of the first 64
// primes (FIPS 180-4, 4.2.2).
var k = [64]uint32{
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
}
