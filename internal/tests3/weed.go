package tests3

import (
	"errors"
	"testing"
)

func weed(t testing.TB, s *Server, endpoints int) error { return errors.New("soon") }
