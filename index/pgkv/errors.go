package pgkv

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/kiln-registry/kiln-registry/index"
)

var (
	// errLost: the connection was lost in a transaction that has not been kept.
	errLost = errors.New("connection lost")
	// errUnknown: nobody knows whether the transaction was kept.
	errUnknown = errors.New("it is not known whether the writes were kept")
)

// SQLSTATE codes and their classes, PostgreSQL 15 documentation, appendix A.
const (
	codeSerialization = "40001"
	codeDeadlock      = "40P01"
	codeReadOnly      = "25006" // the server became a standby
	codeConnections   = "53300"
	codeIdle          = "25P03" // idle_in_transaction_session_timeout
	classConnection   = "08"
	classOperator     = "57" // shutdown, crash, start, cancel
	classDamage       = "XX"
)

// isConflict says whether the server ended a transaction for others, and nothing of it was kept.
func isConflict(err error) bool {
	var e *pgconn.PgError
	return errors.As(err, &e) && (e.Code == codeSerialization || e.Code == codeDeadlock)
}

// isGone says whether the connection or the server went away, or is no primary any more.
func isGone(err error) bool {
	var e *pgconn.PgError
	if !errors.As(err, &e) {
		return true
	}
	switch {
	case e.Code == codeReadOnly, e.Code == codeConnections, e.Code == codeIdle,
		strings.HasPrefix(e.Code, classConnection), strings.HasPrefix(e.Code, classOperator):
		return true
	}
	return e.SeverityUnlocalized == "FATAL" || e.SeverityUnlocalized == "PANIC"
}

// unavailable is the error for one of connecting.
func unavailable(err error) error {
	return fmt.Errorf("%w: %s", index.ErrUnavailable, oneLine(err))
}

// outside is what the caller of a transaction gets for an error of the engine.
func outside(ctx context.Context, err error) error {
	var e *pgconn.PgError
	switch {
	case errors.Is(err, index.ErrUnavailable):
		return err
	case errors.Is(err, errUnknown): // of which ctx is not the reason
		return unavailable(err)
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.As(err, &e) && strings.HasPrefix(e.Code, classDamage):
		return fmt.Errorf("%w: %s", index.ErrDamaged, oneLine(err))
	case isGone(err):
		return unavailable(err)
	}
	return errors.New(oneLine(err))
}

// oneLine is what an error says, in one line: the driver has a line for each host.
func oneLine(err error) string { return strings.Join(strings.Fields(err.Error()), " ") }
