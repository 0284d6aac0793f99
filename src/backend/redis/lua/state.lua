-- The queue's state: read, checked against the sizes of what it counts, made anew where something is missing.

local st, reached, competing = {}, {}, {}
local NUMBERS = {
    'version', 'clock', 'now', 'arrivals', 'waiting', 'in_flight', 'permits', 'heads', 'flows', 'nodes', 'live', 'calls',
    'outbox', 'expected', 'settle', 'wait_until', 'recovery', 'opened', 'granted', 'membership', 'active', 'rules_set',
    'base', 'flow_cap', 'max_waiting', 'max_per_flow', 'too_wide', 'step', 'ramp', 'operator', 'operator_set', 'cursor', 'expiry',
}

local STATE_FORMAT = '>dc16' .. string.rep('d', #NUMBERS) .. string.rep('BdI4', 8)

local now
do -- the server's clock, read once: in some versions it moves on while a script runs
    local time = call('TIME')
    now = tonumber(time[1]) * 1000000 + tonumber(time[2])
end

function q.answer(status, blobs)
    blobs = blobs or {}
    local flags = (blobs.recovering and 1 or 0) + (blobs.more and 2 or 0) + (blobs.listed and 4 or 0)
    return {
        pack('>BBI8c16I8I8I8I8I8I8I8I8I8I8I8I8c8', status, flags, number, st.epoch or NO_FLOW, st.version or 0,
            blobs.pushed or 0, st.waiting or 0, st.in_flight or 0, st.granted or 0, st.base or 0, st.rules_set or 0,
            st.operator or 0, st.operator_set or 0, st.live or 0, st.membership or 0, blobs.wake or 0, blobs.listed or NO_TICKET),
        blobs.grants or '', blobs.refusals or '', blobs.places or '', blobs.peers or '',
    }
end

function q.load_state()
    local packed = call('GET', STATE)
    if packed and (#packed < 8 or unpack_from('>d', packed) ~= LAYOUT) then
        return OTHER_LAYOUT
    end
    if packed then
        local values = { unpack_from(STATE_FORMAT, packed) }
        st.epoch = values[2]
        for i = 1, #NUMBERS do
            st[NUMBERS[i]] = values[i + 2]
        end
        local at = #NUMBERS + 2
        for level = 1, 8 do
            reached[level] = values[at + 1] == 1 and values[at + 2] or nil
            competing[level] = values[at + 3]
            at = at + 3
        end
    end
    if not packed then
        q.new_state()
        return
    end
    local there = call('EXISTS', LINES, TICKETS, HEADS, FLOWS, PERMITS, NODES, CALLS, OUTBOX, EXPECTED)
    local whole = there == (st.waiting > 0 and 2 or 0) + (st.heads > 0 and 1 or 0) + (st.flows > 0 and 1 or 0)
        + (st.permits > 0 and 1 or 0) + (st.nodes > 0 and 1 or 0) + (st.calls > 0 and 1 or 0)
        + (st.outbox > 0 and 1 or 0) + (st.expected > 0 and 1 or 0)
    if whole and kind == RESTATE then
        whole = call('ZCARD', LINES) == st.waiting and call('HLEN', TICKETS) == st.waiting
            and call('ZCARD', HEADS) == st.heads and call('HLEN', FLOWS) == st.flows
            and call('ZCARD', PERMITS) == st.permits and call('ZCARD', NODES) == st.nodes
            and call('HLEN', CALLS) == st.calls and call('ZCARD', OUTBOX) == st.outbox
            and call('SCARD', EXPECTED) == st.expected
    end
    if not whole then
        q.new_state()
    end
end

function q.recovering()
    return st.clock < st.settle or (st.clock < st.wait_until and st.expected > 0)
end

function q.save_state()
    local values = { LAYOUT, st.epoch }
    for i = 1, #NUMBERS do
        values[i + 2] = st[NUMBERS[i]]
    end
    local at = #NUMBERS + 2
    for level = 1, 8 do
        values[at + 1] = reached[level] and 1 or 0
        values[at + 2] = reached[level] or 0
        values[at + 3] = competing[level]
        at = at + 3
    end
    call('SET', STATE, pack(STATE_FORMAT, unpack(values, 1, at)))
end
