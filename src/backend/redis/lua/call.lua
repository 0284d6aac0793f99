-- The call itself.

function q.count_capacity()
    st.capacity = st.operator > 0 and st.operator or st.base
end

function q.open_capacity() -- the units that may be in flight now
    if q.recovering() then
        return -1, 0
    end
    if st.opened == 0 then
        st.opened = st.clock
    end
    local since = st.clock - st.opened
    if since < st.ramp then
        return min(st.capacity, ceil(st.capacity * since / st.ramp)), st.heads > 0 and 50000 or 0
    end
    return st.capacity, 0
end

if q.load_state() == OTHER_LAYOUT then
    return q.answer(OTHER_LAYOUT)
end

q.count_capacity()
local age = now - st.now
st.clock = st.clock + max(0, min(age, q.recovering() and RECOVERY_STEP or MAX_STEP))
st.now = now
if age > SETTLE and st.live > 0 then
    st.opened = st.clock -- nobody has called for longer than any node keeps silent: they all come back at once
end
if my_epoch == st.epoch and version > st.version then -- an older state than the node has seen
    local nodes = {}
    if age < lease then
        for _, member in ipairs(call('ZRANGEBYSCORE', NODES, '(0', '+inf')) do
            if sub(member, 1, 1) == 'N' then
                nodes[#nodes + 1] = sub(member, 2)
            end
        end
    end
    q.recover()
    q.expect(nodes)
end
st.version = st.version + 1

local entry = q.read_node(me)
local alive = entry and entry.live == 1
local status = OK
if entry and number <= entry.number then
    status = STALE
elseif kind == RESTATE then
    if not alive and call('ZSCORE', NODES, 'D' .. me) then
        status = REAPING
    end
elseif not alive then
    status = UNKNOWN
elseif my_epoch ~= st.epoch then
    status = OTHER_EPOCH
elseif number > entry.number + 1 then
    status = GAP -- this state has not seen an earlier call: it was rolled back
end
if status ~= OK and status ~= REAPING then
    q.save_state()
    return q.answer(status)
end

if status == OK then
    if not entry then
        entry = { session = 0, pushed = 0, acked = 0, waiting = 0, restated = 0, live = 0 }
        known[me] = entry
    end
    entry.number = number
    q.write_node(me)
    if not alive then
        st.nodes = st.nodes - call('ZREM', NODES, 'T' .. me) + 1
        st.live, st.membership = st.live + 1, st.membership + 1
        entry.live, st.expiry = 1, min(st.expiry, st.clock + lease)
    end
    call('ZADD', NODES, q.text(st.clock + lease), 'N' .. me)
    living[me] = true
end
if kind == DETACH and status == OK then -- what it has goes back in this call
    q.die(me)
    st.nodes = st.nodes + call('ZADD', NODES, q.text(st.clock + lease), 'T' .. me)
end
local more = false
if st.clock >= st.expiry then
    more = q.reap()
end

local pushed, listed = 0, nil
if status == OK then
    if kind == RESTATE then
        if st.clock < st.wait_until and my_epoch ~= st.epoch then
            local named = {}
            for at = 1, #ARGV[3], 16 do
                local peer = sub(ARGV[3], at, at + 15)
                local other = q.read_node(peer)
                if not other or other.restated ~= st.recovery then
                    named[#named + 1] = peer
                end
            end
            q.expect(named)
        end
        q.set_rules(ARGV[2], fresh, false)
        q.forget_outbox(me)
        entry.session, entry.pushed, entry.acked = number, 0, 0
    elseif #ARGV[2] > 0 then
        q.set_rules(ARGV[2], false, true)
    end
    if kind ~= RESTATE then
        pushed = entry.acked
        if received > pushed or entry.pushed > pushed then
            pushed = q.tell_again(entry)
        end
        more = more or pushed < entry.pushed
    end
    if #ARGV[6] > 0 then
        local ended = {}
        for at = 1, #ARGV[6], 8 do
            ended[#ended + 1] = me .. sub(ARGV[6], at, at + 7)
        end
        q.finish_all(ended)
    end
    if #ARGV[5] > 0 then
        q.release_all(ARGV[5])
    end
    for at = 1, #ARGV[7], 28 do
        local ticket, units, flow = unpack_from('>c8I4c16', ARGV[7], at)
        q.hold(ticket, units, flow)
    end
    if last then
        entry.restated = st.recovery
        local restated = call('SREM', EXPECTED, me)
        st.expected, st.membership = st.expected - restated, st.membership + restated
    end
    if lists then
        listed = q.list_permits()
    end
end

local wake
open, wake = q.open_capacity()
if status == OK then
    if st.heads > 0 or st.flow_cap < NO_BOUND then -- otherwise most are granted without a look at their flow
        local ids, named = {}, {}
        for at = 9, #ARGV[4], 40 do
            local id = sub(ARGV[4], at, at + 15)
            if not (flows[id] or named[id]) then
                named[id] = true
                ids[#ids + 1] = id
            end
        end
        q.read_flows(ids)
    end
    for at = 1, #ARGV[4], 40 do
        local ticket, flow, ask, arrival, how = unpack_from('>c8c16c7c8B', ARGV[4], at)
        if how == 2 then
            q.enqueue_again(ticket, flow, ask, arrival)
        else
            q.enqueue(ticket, flow, ask, how == 1)
        end
    end
end
if #new_tickets > 0 then
    q.write_tickets()
end
if st.heads > 0 then
    more = q.dispatch() or more
end
q.write_permits()
if rawget(q, 'save_order') then
    q.save_order()
end
if next(pushes) then
    q.pass_on()
end
q.save_nodes()
local reply = {
    recovering = q.recovering(), more = more, pushed = pushed, listed = listed, wake = wake,
    grants = concat(grants), refusals = concat(refusals), places = concat(places),
    peers = peers_seen ~= st.membership and q.peers() or '',
}
q.save_state()
return q.answer(status, reply)
