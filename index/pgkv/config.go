package pgkv

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// defaults are the parameters of a URL that has them not.
var defaults = map[string]string{
	"target_session_attrs": "read-write", "connect_timeout": "2", "application_name": "kiln-registry",
}

// configure makes of a URL and Options what a pool is made with.
func configure(address string, o Options) (*pgxpool.Config, error) {
	scheme, _, _ := strings.Cut(address, "://")
	if scheme != "postgres" && scheme != "postgresql" {
		return nil, errors.New("the index is no postgres:// URL (want postgres://USER@HOST,HOST/DATABASE)")
	}
	before, query, _ := strings.Cut(address, "?")
	params, err := url.ParseQuery(query)
	if err != nil {
		return nil, errors.New("the parameters of the index's URL don't parse (want ?NAME=VALUE&NAME=VALUE)")
	}
	for name, value := range defaults {
		if !params.Has(name) {
			params.Set(name, value)
		}
	}
	limited := params.Has("pool_max_conns")
	c, err := pgxpool.ParseConfig(before + "?" + params.Encode())
	if err != nil {
		return nil, fmt.Errorf("the index's URL: %s", redacted(err, address))
	}
	if o.Conns > 0 {
		c.MaxConns = int32(o.Conns)
	} else if !limited {
		c.MaxConns = conns
	}
	if c.ConnConfig.RuntimeParams["timezone"] == "" {
		c.ConnConfig.RuntimeParams["timezone"] = "UTC"
	}
	c.ConnConfig.OnNotice = noteWarning
	c.AfterConnect = prepare
	if o.PasswordFile != "" {
		c.BeforeConnect = func(_ context.Context, c *pgx.ConnConfig) error {
			b, err := os.ReadFile(o.PasswordFile)
			if err != nil {
				return fmt.Errorf("read the index's password: %w", err)
			}
			c.Password = strings.TrimRight(string(b), "\r\n")
			return nil
		}
	}
	return c, nil
}

// redacted is what the driver says of a URL, without anything of the URL if that has a password: the driver can't blot
// out one in a URL that it does not understand.
func redacted(err error, address string) string {
	_, rest, _ := strings.Cut(address, "://")
	host, _, _ := strings.Cut(rest, "?")
	if strings.Contains(host, "@") && strings.Contains(host[:strings.LastIndex(host, "@")], ":") ||
		strings.Contains(strings.ToLower(rest), "password") {
		return "it does not parse (a password in it has to be percent-encoded)"
	}
	return oneLine(err)
}

// warned is what of a connection's custom data says that the server sent a warning.
const warned = "warned"

// noteWarning is called for the server's notices. A commit that comes with a warning was kept by the primary, but its
// standbys have perhaps not got it.
func noteWarning(c *pgconn.PgConn, n *pgconn.Notice) {
	if n.SeverityUnlocalized == "WARNING" {
		c.CustomData()[warned] = n.Message
	}
}

// prepare sets up a connection. A statement reads by the index and not the whole table: under SERIALIZABLE what it read
// is what others must not write. A transaction whose process hangs does not hold up the others for long.
func prepare(ctx context.Context, c *pgx.Conn) error {
	_, err := c.Exec(ctx, "set enable_seqscan = off; set enable_bitmapscan = off; set jit = off;"+
		"set idle_in_transaction_session_timeout = '60s';"+
		"select set_config('synchronous_commit', 'on', false) where current_setting('synchronous_commit') = 'off'")
	return err
}
