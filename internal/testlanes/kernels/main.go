// The command kernels prints what KILN_LANES may name on this processor, slowest first.
package main

import (
	"fmt"

	"github.com/kiln-registry/kiln-registry/identity/lanes"
)

func main() {
	for _, name := range lanes.Kernels() {
		fmt.Println(name)
	}
}
