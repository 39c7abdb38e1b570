//go:build !unix

package pgserver

import (
	"context"
	"errors"
)

// startLocal has no way on Windows to tie a server to the life of this program.
func startLocal(context.Context, env, int, Options) (*Server, error) {
	return nil, errors.New("pgserver: on this system a server cannot be started here: set LATCHKEY_DATABASE_URL to the connection string of one")
}

func cacheDir() (string, error) { return "", errors.ErrUnsupported }
