-- The call itself.

local function reap() -- what silent nodes held, in bounded portions
    local left, more = REAP, false
    for _, member in ipairs(call('ZRANGEBYSCORE', NODES, '-inf', text(st.clock), 'LIMIT', 0, 16)) do
        local kind, node = sub(member, 1, 1), sub(member, 2)
        if kind == 'T' then
            st.nodes = st.nodes - call('ZREM', NODES, member)
            forget_node(node)
        else
            if kind == 'N' then
                die(node)
            end
            local held = call('ZRANGEBYLEX', PERMITS, '[' .. node, '(' .. node .. '\255', 'LIMIT', 0, left + 1)
            local whole = #held <= left
            if not whole then
                remove(held)
            end
            if #held > 0 then
                call('ZREM', PERMITS, unpack(held))
                for _, permit in ipairs(held) do
                    give_units(permit)
                end
                left = left - #held
            end
            local entry = read_node(node)
            if whole and (not entry or entry.waiting == 0) then
                forget_outbox(node)
                st.nodes = st.nodes - call('ZREM', NODES, 'D' .. node)
                if entry and not call('ZSCORE', NODES, 'T' .. node) then
                    forget_node(node)
                end
            else
                more = true
            end
        end
    end
    if not more then
        return false
    end
    local scan = call('HSCAN', TICKETS, text(st.cursor), 'COUNT', SWEEP)
    st.cursor = tonumber(scan[1])
    for i = 1, #scan[2], 2 do
        local key, packed = scan[2][i], scan[2][i + 1]
        if not gone_tickets[key] and not is_live(sub(key, 1, 16)) then
            cancel(key, packed)
        end
    end
    return true
end

local function count_capacity()
    st.capacity = st.operator > 0 and st.operator or st.base
end

local function set_rules(blob, fresh, by_operator)
    local base, flow_cap, max_waiting, max_per_flow, too_wide, step, ramp, rules_set, operator, operator_set =
        unpack_from('>I8I8I8I8BI4I8I8I8I8', blob)
    if fresh or rules_set > st.rules_set then
        st.base, st.flow_cap, st.max_waiting, st.max_per_flow = base, flow_cap, max_waiting, max_per_flow
        st.too_wide, st.step, st.ramp = too_wide, step, ramp
        st.rules_set = fresh and max(st.rules_set, rules_set) + 1 or rules_set
    end
    if by_operator then -- newer than whatever was set before, by whomever
        st.operator, st.operator_set = operator, max(st.operator_set, operator_set) + 1
    elseif operator_set > st.operator_set then
        st.operator, st.operator_set = operator, operator_set
    end
    count_capacity()
end

local function pass_on() -- grants of other nodes
    local records, sent = {}, false
    for node, list in pairs(pushes) do
        local entry = read_node(node)
        local first = entry.pushed + 1
        for i, record in ipairs(list) do
            records[#records + 1] = 0
            records[#records + 1] = node .. pack('>I8', entry.pushed + i) .. record
        end
        entry.pushed = entry.pushed + #list
        write_node(node)
        local channel = ARGV[8] .. string.gsub(node, '.', function(c)
            return string.format('%02x', byte(c))
        end)
        publish(channel, st.epoch .. pack('>I8I8', entry.session, first) .. concat(list))
    end
    if #records > 0 then
        st.outbox = st.outbox + #records / 2
        call_many('ZADD', OUTBOX, records)
    end
end

local function tell_again(entry) -- what pushes may have lost
    local told = 0
    if received > entry.acked then
        local upto = min(received, entry.pushed)
        st.outbox = st.outbox
            - call('ZREMRANGEBYLEX', OUTBOX, '[' .. me, '(' .. me .. pack('>I8', upto + 1))
        entry.acked = upto
    end
    if entry.pushed > entry.acked then
        for _, member in ipairs(call('ZRANGEBYLEX', OUTBOX, '[' .. me, '(' .. me .. '\255', 'LIMIT', 0, TELL)) do
            grants[#grants + 1] = sub(member, 25)
            told = told + 1
        end
    end
    return entry.acked + told
end

local function list_permits() -- what Redis thinks the node holds; the node knows better
    local from, listing = list_from, false
    local members = call('ZRANGEBYLEX', PERMITS, '[' .. me .. from, '(' .. me .. '\255', 'LIMIT', 0, TELL)
    for _, member in ipairs(members) do
        local units, flow = unpack_from('>I4c16', member, 25)
        tell(me, sub(member, 17, 24), units, flow ~= NO_FLOW)
    end
    if #members == TELL then
        -- The next ticket number: nothing is skipped, and one permit at most is told twice.
        return sub(members[TELL], 17, 24)
    end
end

local function open_capacity() -- the units that may be in flight now
    if recovering() then
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

local function peers()
    if peers_seen == st.membership then
        return ''
    end
    local nodes = call('SMEMBERS', EXPECTED)
    for _, member in ipairs(call('ZRANGEBYSCORE', NODES, '(0', '+inf')) do
        if sub(member, 1, 1) == 'N' then
            nodes[#nodes + 1] = sub(member, 2)
        end
    end
    return concat(nodes)
end

if load_state() == OTHER_LAYOUT then
    return answer(OTHER_LAYOUT)
end

count_capacity()
local age = now - st.now
st.clock = st.clock + max(0, min(age, recovering() and RECOVERY_STEP or MAX_STEP))
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
    recover()
    expect(nodes)
end
st.version = st.version + 1

local entry = read_node(me)
local alive = call('ZSCORE', NODES, 'N' .. me)
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
    save_state()
    return answer(status)
end

if status == OK then
    if not entry then
        entry = { session = 0, pushed = 0, acked = 0, waiting = 0, restated = 0 }
        known[me] = entry
    end
    entry.number = number
    write_node(me)
    if not alive then
        st.nodes = st.nodes - call('ZREM', NODES, 'T' .. me) + 1
        st.live, st.membership = st.live + 1, st.membership + 1
    end
    call('ZADD', NODES, text(st.clock + lease), 'N' .. me)
    living[me] = true
end
if kind == DETACH and status == OK then -- what it has goes back in this call
    die(me)
    st.nodes = st.nodes + call('ZADD', NODES, text(st.clock + lease), 'T' .. me)
end
local more = reap()

local pushed, listed = 0, nil
if status == OK then
    if kind == RESTATE then
        if st.clock < st.wait_until and my_epoch ~= st.epoch then
            local named = {}
            for at = 1, #ARGV[3], 16 do
                local peer = sub(ARGV[3], at, at + 15)
                local other = read_node(peer)
                if not other or other.restated ~= st.recovery then
                    named[#named + 1] = peer
                end
            end
            expect(named)
        end
        set_rules(ARGV[2], fresh, false)
        forget_outbox(me)
        entry.session, entry.pushed, entry.acked = number, 0, 0
    elseif #ARGV[2] > 0 then
        set_rules(ARGV[2], false, true)
    end
    if kind ~= RESTATE then
        pushed = tell_again(entry)
        more = more or pushed < entry.pushed
    end
    local ended = {}
    for at = 1, #ARGV[6], 8 do
        ended[#ended + 1] = me .. sub(ARGV[6], at, at + 7)
    end
    finish_all(ended)
    release_all(ARGV[5])
    for at = 1, #ARGV[7], 28 do
        local ticket, units, flow = unpack_from('>c8I4c16', ARGV[7], at)
        hold(ticket, units, flow)
    end
    if last then
        entry.restated = st.recovery
        local restated = call('SREM', EXPECTED, me)
        st.expected, st.membership = st.expected - restated, st.membership + restated
    end
    if lists then
        listed = list_permits()
    end
end

local wake
open, wake = open_capacity()
if status == OK then
    local ids, named = {}, {}
    for at = 9, #ARGV[4], 40 do
        local id = sub(ARGV[4], at, at + 15)
        if not (flows[id] or named[id]) then
            named[id] = true
            ids[#ids + 1] = id
        end
    end
    if st.heads > 0 or st.flow_cap < NO_BOUND then -- otherwise most are granted without a look at their flow
        read_flows(ids)
    end
    for at = 1, #ARGV[4], 40 do
        local ticket, flow, ask, arrival, how = unpack_from('>c8c16c7c8B', ARGV[4], at)
        if how == 2 then
            enqueue_again(ticket, flow, ask, arrival)
        else
            enqueue(ticket, flow, ask, how == 1)
        end
    end
end
write_tickets()
more = dispatch() or more
write_permits()
save_order()
rebase()
pass_on()
save_nodes()
local reply = {
    recovering = recovering(), more = more, pushed = pushed, listed = listed, wake = wake,
    grants = concat(grants), refusals = concat(refusals), places = concat(places), peers = peers(),
}
save_state()
return answer(status, reply)
