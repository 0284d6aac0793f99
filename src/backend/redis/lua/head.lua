-- One call of a node: renews its lease, moves the queue clock, reaps, applies the node's operations, grants what can be granted.
-- docs/PROTOCOL.md describes keys, arguments and reply; the fair order is that of `schedule`, step for step.
--
-- KEYS   state lines tickets heads flows permits nodes calls outbox expected
-- ARGV   head, rules, peers, enqueues, releases, finishes, held (packed, see the readers below), channel prefix, publish command
-- Return head, grants, refusals, places, peers (packed)
-- Cost   O(operations + grants + reaped) set operations of O(log n), each bounded by the caller or by a constant below.
--
-- Nothing is written before the call is known to be valid; from then on no step can fail, as a script is not rolled back.

local STATE, LINES, TICKETS, HEADS, FLOWS = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local PERMITS, NODES, CALLS, OUTBOX, EXPECTED = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]

local LAYOUT = 1
local MAX_STEP, RECOVERY_STEP, SETTLE = 1500000, 300000, 1800000 -- microseconds of queue time
local REAP, SWEEP, TELL = 128, 200, 256 -- most entries per call: permits reaped, tickets looked at, grants told again
local SCALE, REBASE_AT = 1024, 2 ^ 52
local NO_FLOW, NO_TICKET = string.rep('\0', 16), string.rep('\0', 8)
local OK, UNKNOWN, OTHER_EPOCH, GAP, STALE, REAPING, OTHER_LAYOUT = 0, 1, 2, 3, 4, 5, 6
local ORDINARY, RESTATE, RESTATE_ON, DETACH = 0, 1, 2, 3
local QUEUE_FULL, FLOW_FULL, TOO_WIDE, WOULD_WAIT = 1, 2, 5, 6 -- as `Cause` numbers them

-- A script makes its functions anew in each call, and to make all of these takes longer than all else a small call does. So those that only
-- some calls need stand in groups, and a group is made when one of its functions is first asked for.
local groups, made = {}, 0
local q = setmetatable({}, {
    __index = function(functions, name)
        while made < #groups do
            made = made + 1
            groups[made]()
            local found = rawget(functions, name)
            if found then
                return found
            end
        end
    end,
})
local call = redis.call
local pack, unpack_from = struct.pack, struct.unpack
local byte, sub, concat, remove = string.byte, string.sub, table.concat, table.remove
local floor, min, max, ceil = math.floor, math.min, math.max, math.ceil

local me, my_epoch, number, version, received, lease, peers_seen, list_from, kind, flags, grants_left =
    unpack_from('>c16c16I8I8I8I8I8c8BBI4', ARGV[1])
local last, fresh, lists = flags % 2 == 1, floor(flags / 2) % 2 == 1, floor(flags / 4) % 2 == 1

function q.publish(channel, message)
    call(ARGV[9], channel, message)
end

function q.text(n) -- numbers of 14 digits and more lose some in `tostring`
    return string.format('%.0f', n)
end

local packed_units = {}
function q.units_of(units) -- four bytes, packed once for each number
    local packed = packed_units[units]
    if not packed then
        packed = pack('>I4', units)
        packed_units[units] = packed
    end
    return packed
end

local CHUNK = 2000 -- Lua's stack holds so many arguments and more
function q.call_many(command, key, arguments)
    local n = #arguments
    for first = 1, n, CHUNK do
        call(command, key, unpack(arguments, first, min(first + CHUNK - 1, n)))
    end
end
