-- Creates accounts of money, the entries that move it, and the transfers that join two of them.
--
-- Amounts are whole minor units of the currency that the owner of the account has agreed on, such as cents. An
-- account's balance is what its entries add up to; both are written by one statement.
--
-- The rules are judged under the advisory lock account:<account_id>: no more leaves an account than is in it,
-- and no more than daily_limit on one day. The first is also a constraint: a writer that skips the lock cannot
-- take a balance below 0. The second is a sum over rows, which no constraint can say.
--
-- Idempotency keys are columns here, not a table of their own: a key belongs to its account, or for a new one to
-- its owner, so the lock covers it too, and a repeat finds the first row by one index.
--
-- Locks: none that anything else waits for; new objects only. Scans and rewrites nothing.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000003_create_accounts.up.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

CREATE TABLE latchkey.accounts (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    owner_id uuid NOT NULL,
    balance bigint NOT NULL DEFAULT 0,
    daily_limit bigint NOT NULL DEFAULT 0,
    -- That the zone is known is checked by AccountInsert. It is no constraint, since that would be true on one
    -- server and false on another with other time zone files, where a dump could then not be loaded.
    time_zone text NOT NULL DEFAULT 'UTC',
    idempotency_key text,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT accounts_pkey PRIMARY KEY (id),
    CONSTRAINT accounts_balance_check CHECK (balance >= 0),
    CONSTRAINT accounts_daily_limit_check CHECK (daily_limit >= 0),
    CONSTRAINT accounts_time_zone_check CHECK (time_zone <> ''),
    CONSTRAINT accounts_idempotency_key_check CHECK (octet_length(idempotency_key) BETWEEN 1 AND 255)
);

COMMENT ON TABLE latchkey.accounts IS 'Money of an owner, in minor units of one currency.';
COMMENT ON COLUMN latchkey.accounts.owner_id IS 'Whose account it is; the host''s own id, with no foreign key.';
COMMENT ON COLUMN latchkey.accounts.balance IS 'What is in the account, in minor units: the sum of its entries, in less out.';
COMMENT ON COLUMN latchkey.accounts.daily_limit IS 'How much may leave the account on one day of its time zone, in minor units; 0 is no limit.';
COMMENT ON COLUMN latchkey.accounts.time_zone IS 'The IANA time zone of the account''s days, such as Europe/Berlin.';
COMMENT ON COLUMN latchkey.accounts.idempotency_key IS 'The caller''s key for opening the account, unique per owner; NULL is none. At most 255 bytes.';
COMMENT ON COLUMN latchkey.accounts.created_at IS 'When the row was written, by the server''s clock.';

CREATE UNIQUE INDEX accounts_idempotency_key
    ON latchkey.accounts (owner_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
COMMENT ON INDEX latchkey.accounts_idempotency_key IS
    'One account per idempotency key of an owner; serves AccountInsert.';

CREATE TABLE latchkey.transfers (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    from_account_id uuid NOT NULL,
    to_account_id uuid NOT NULL,
    amount bigint NOT NULL,
    -- Not now(): that is when the transaction began, before it waited for the locks.
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT transfers_pkey PRIMARY KEY (id),
    CONSTRAINT transfers_from_account_id_fkey FOREIGN KEY (from_account_id) REFERENCES latchkey.accounts (id),
    CONSTRAINT transfers_to_account_id_fkey FOREIGN KEY (to_account_id) REFERENCES latchkey.accounts (id),
    CONSTRAINT transfers_to_account_id_check CHECK (to_account_id <> from_account_id),
    CONSTRAINT transfers_amount_check CHECK (amount > 0)
);

COMMENT ON TABLE latchkey.transfers IS 'Money that moved from one account to another; each has two entries.';
COMMENT ON COLUMN latchkey.transfers.from_account_id IS 'Where the money left, by an entry of the kind transfer_out.';
COMMENT ON COLUMN latchkey.transfers.to_account_id IS 'Where it arrived, by an entry of the kind transfer_in.';
COMMENT ON COLUMN latchkey.transfers.amount IS 'How much it was, in minor units.';
COMMENT ON COLUMN latchkey.transfers.created_at IS 'When the row was written, under the locks, by the server''s clock; both entries have the same.';

CREATE INDEX transfers_from_account_id_idx ON latchkey.transfers (from_account_id);
COMMENT ON INDEX latchkey.transfers_from_account_id_idx IS 'Serves the foreign key.';

CREATE INDEX transfers_to_account_id_idx ON latchkey.transfers (to_account_id);
COMMENT ON INDEX latchkey.transfers_to_account_id_idx IS 'Serves the foreign key.';

CREATE TABLE latchkey.entries (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    account_id uuid NOT NULL,
    kind text NOT NULL,
    amount bigint NOT NULL,
    balance_after bigint NOT NULL,
    transfer_id uuid,
    idempotency_key text,
    -- Not now(): that is when the transaction began, before it waited for the lock.
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT entries_pkey PRIMARY KEY (id),
    CONSTRAINT entries_account_id_fkey FOREIGN KEY (account_id) REFERENCES latchkey.accounts (id),
    CONSTRAINT entries_transfer_id_fkey FOREIGN KEY (transfer_id) REFERENCES latchkey.transfers (id),
    CONSTRAINT entries_kind_check CHECK (kind IN ('deposit', 'withdrawal', 'transfer_in', 'transfer_out')),
    CONSTRAINT entries_amount_check CHECK (amount > 0),
    CONSTRAINT entries_balance_after_check CHECK (balance_after >= 0),
    CONSTRAINT entries_transfer_id_check CHECK ((kind IN ('transfer_in', 'transfer_out')) = (transfer_id IS NOT NULL)),
    CONSTRAINT entries_idempotency_key_check CHECK (octet_length(idempotency_key) BETWEEN 1 AND 255)
);

COMMENT ON TABLE latchkey.entries IS 'What moved in an account. Rows are added, never changed.';
COMMENT ON COLUMN latchkey.entries.kind IS 'deposit or transfer_in, which add to the balance; withdrawal or transfer_out, which take from it.';
COMMENT ON COLUMN latchkey.entries.amount IS 'How much it was, in minor units, above 0 for every kind.';
COMMENT ON COLUMN latchkey.entries.balance_after IS 'The balance of the account once the entry was written, in minor units.';
COMMENT ON COLUMN latchkey.entries.transfer_id IS 'The transfer that the entry is one side of; NULL for a deposit or withdrawal.';
COMMENT ON COLUMN latchkey.entries.idempotency_key IS
    'The caller''s key for what it did, unique per account; NULL is none. A transfer''s is on its transfer_out. At most 255 bytes.';
COMMENT ON COLUMN latchkey.entries.created_at IS 'When the row was written, under the lock, by the server''s clock; it decides the day.';

CREATE UNIQUE INDEX entries_idempotency_key
    ON latchkey.entries (account_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
COMMENT ON INDEX latchkey.entries_idempotency_key IS
    'One entry per idempotency key of an account; serves EntryInsertDeposit, EntryInsertWithdrawal and TransferInsert.';

CREATE UNIQUE INDEX entries_transfer_id_kind_key
    ON latchkey.entries (transfer_id, kind)
    WHERE transfer_id IS NOT NULL;
COMMENT ON INDEX latchkey.entries_transfer_id_kind_key IS 'Each side of a transfer once; serves the foreign key.';

CREATE INDEX entries_account_id_created_at_idx
    ON latchkey.entries (account_id, created_at DESC, id DESC);
COMMENT ON INDEX latchkey.entries_account_id_created_at_idx IS 'Serves EntryListByAccount and the foreign key.';

CREATE INDEX entries_outgoing_idx
    ON latchkey.entries (account_id, created_at) INCLUDE (amount)
    WHERE kind IN ('withdrawal', 'transfer_out');
COMMENT ON INDEX latchkey.entries_outgoing_idx IS
    'What leaves an account, for the sum of a day without the table; serves EntryInsertWithdrawal and TransferInsert.';
