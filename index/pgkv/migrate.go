package pgkv

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kiln-registry/kiln-registry/index"
)

// migrations bring the tables from one version to the next; those of version n are the first n of them. Each statement
// has the schema for %[1]s. A released one is never changed.
var migrations = []string{
	// Rows are often written anew in place, with room left for it. A value is read far more often than written.
	`create table %[1]s.kv (k bytea primary key, v bytea not null) with (fillfactor = 90)`,
}

// migrationLock is the key of the advisory lock that who migrates has.
const migrationLock = 0x6b696c6e6b76 // "kilnkv"

// migrate brings the tables to the last version. index.ErrFormat if they are of a later one.
func migrate(ctx context.Context, pool *pgxpool.Pool, schema string) error {
	has, err := version(ctx, pool, schema)
	if err == nil && has < len(migrations) {
		err = pgx.BeginFunc(ctx, pool, func(x pgx.Tx) error {
			if _, err := x.Exec(ctx, "select pg_advisory_xact_lock($1)", int64(migrationLock)); err != nil {
				return err
			}
			if has, err = version(ctx, x, schema); err == nil {
				err = raise(ctx, x, schema, has)
			}
			return err
		})
	}
	if err != nil {
		return outside(ctx, err)
	}
	if has > len(migrations) {
		return fmt.Errorf("%w: its tables have version %d, this program knows %d", index.ErrFormat, has, len(migrations))
	}
	return nil
}

// queryer is a pool or a transaction.
type queryer interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// version returns that of the tables; 0: there are none.
func version(ctx context.Context, q queryer, schema string) (n int, err error) {
	there, err := exists(ctx, q, "pg_class c join pg_namespace n on n.oid = c.relnamespace"+
		" where c.relname = 'version' and n.nspname = $1", schema)
	if err != nil || !there {
		return 0, err
	}
	err = q.QueryRow(ctx, "select n from "+pgx.Identifier{schema, "version"}.Sanitize()).Scan(&n)
	return n, err
}

// exists asks the catalog's tables: to_regclass and the like answer from a cache that may be of before the transaction.
func exists(ctx context.Context, q queryer, from, schema string) (there bool, err error) {
	err = q.QueryRow(ctx, "select exists (select from "+from+")", schema).Scan(&there)
	return there, err
}

// raise runs the migrations after the first has.
func raise(ctx context.Context, x pgx.Tx, schema string, has int) error {
	name := pgx.Identifier{schema}.Sanitize()
	if has == 0 {
		there, err := exists(ctx, x, "pg_namespace where nspname = $1", schema)
		if err != nil {
			return err
		}
		steps := []string{"create schema " + name}
		if there { // made by an administrator, where the program may not
			steps = nil
		}
		for _, s := range append(steps,
			"create table "+name+".version (n int not null)", "insert into "+name+".version values (0)") {
			if _, err := x.Exec(ctx, s); err != nil {
				return err
			}
		}
	}
	for n := has; n < len(migrations); n++ {
		if _, err := x.Exec(ctx, fmt.Sprintf(migrations[n], name)); err != nil {
			return fmt.Errorf("migration %d: %w", n+1, err)
		}
	}
	if has < len(migrations) {
		_, err := x.Exec(ctx, "update "+name+".version set n = $1", len(migrations))
		return err
	}
	return nil
}
