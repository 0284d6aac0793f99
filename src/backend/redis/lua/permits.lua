-- Permits: units that are granted, and who is told.
--
-- PERMITS  members node ticket units flow, all scores 0; the flow is 0 where its units are not counted
-- OUTBOX   members node sequence ticket units counted: grants told by a push and not acknowledged yet

local NO_BOUND = 2 ^ 53
local open = -1 -- the units that may be in flight now; less than the capacity while recovering
local granted, grants, refusals, places, pushes = 0, {}, {}, {}, {}
local new_permits, new_lines, new_tickets = {}, {}, {}

local function tell(node, ticket, units, counted)
    local record = ticket .. units_of(units) .. (counted and '\1' or '\0')
    if node == me then
        grants[#grants + 1] = record
    else
        local list = pushes[node]
        if not list then
            list = {}
            pushes[node] = list
        end
        list[#list + 1] = record
    end
end

local function take_units(f, node, ticket, units)
    local counted = f and st.flow_cap < NO_BOUND
    st.in_flight, st.permits, st.granted = st.in_flight + units, st.permits + 1, st.granted + units
    if counted then
        f.running = f.running + units
        flows_touched[f.id] = f
    end
    local n = #new_permits
    new_permits[n + 1], new_permits[n + 2] = 0, node .. ticket .. units_of(units) .. (counted and f.id or NO_FLOW)
    return counted
end

local function give_units(member) -- a permit's member, which was in PERMITS
    local units, flow = unpack_from('>I4c16', member, 25)
    st.in_flight, st.permits = st.in_flight - units, st.permits - 1
    if flow ~= NO_FLOW then
        local f = read_flow(flow)
        f.running = max(0, f.running - units)
        flows_touched[flow] = f
        if not f.head then
            compete(f)
        end
    end
end

local function find_permit(key) -- `key`: node and ticket
    return call('ZRANGEBYLEX', PERMITS, '[' .. key, '(' .. key .. '\255\255\255\255\255', 'LIMIT', 0, 1)[1]
end

local function write_permits()
    if #new_permits > 0 then
        call_many('ZADD', PERMITS, new_permits)
        new_permits = {}
    end
end

local function cancel(key, packed) -- a waiting ticket
    leave_line(read_flow(sub(packed, 1, 16)), sub(packed, 17) .. key)
end

-- Ends of tickets: one that waits leaves its line, one that was granted gives its units back, any other is nothing.
local function finish_all(keys)
    if #keys == 0 then
        return
    end
    for i, packed in ipairs(call('HMGET', TICKETS, unpack(keys))) do
        local member = not packed and find_permit(keys[i])
        if packed then
            if not gone_tickets[keys[i]] then
                cancel(keys[i], packed)
            end
        elseif member then
            call('ZREM', PERMITS, member)
            give_units(member)
        end
    end
end

-- Ends of permits, each told with its units, so that one command finds them all.
local function release_all(blob)
    local members, found, others = {}, {}, {}
    for at = 1, #blob, 28 do
        members[#members + 1] = me .. sub(blob, at, at + 27)
    end
    if #members == 0 then
        return
    end
    local scores = call('ZMSCORE', PERMITS, unpack(members))
    for i = 1, #members do
        if scores[i] then
            found[#found + 1] = members[i]
        else
            others[#others + 1] = sub(members[i], 1, 24)
        end
    end
    if #found > 0 then
        call('ZREM', PERMITS, unpack(found))
        for i = 1, #found do
            give_units(found[i])
        end
    end
    finish_all(others)
end

local function arrive()
    st.arrivals = max(st.arrivals + 1, now) -- after a loss, new tickets stand behind those that are restated
    return pack('>I8', st.arrivals)
end

local function refuse(ticket, cause)
    refusals[#refusals + 1] = ticket .. pack('>B', cause)
end

local function stand_in_line(f, ticket, key, arrival, ask)
    local n = #new_tickets
    f.n, st.waiting = f.n + 1, st.waiting + 1
    flows_touched[f.id] = f
    new_tickets[n + 1], new_tickets[n + 2] = key, f.id .. arrival .. ask
    add_waiting(me, 1)
    places[#places + 1] = ticket .. arrival
end

local function enqueue(ticket, flow, ask, waits)
    local cost = unpack_from('>I4', ask)
    if st.too_wide == 1 and cost > widest() then
        return refuse(ticket, TOO_WIDE)
    end
    local counts, f = st.flow_cap < NO_BOUND, nil
    if st.heads == 0 then
        local units = clamp(cost)
        if st.in_flight + units <= open then
            f = counts and read_flow(flow)
            if not counts or (f.n == 0 and f.running + units <= st.flow_cap) then
                arrive()
                granted = granted + 1
                return tell(me, ticket, units, take_units(f, me, ticket, units))
            end
        end
    end
    if not waits then
        return refuse(ticket, WOULD_WAIT)
    end
    if st.waiting >= st.max_waiting then
        return refuse(ticket, QUEUE_FULL)
    end
    f = read_flow(flow)
    if f.n >= st.max_per_flow then
        return refuse(ticket, FLOW_FULL)
    end
    local arrival, key = arrive(), me .. ticket
    local tail = arrival .. ask .. key
    local n = #new_lines
    stand_in_line(f, ticket, key, arrival, ask)
    new_lines[n + 1], new_lines[n + 2] = 0, flow .. tail
    if f.n == 1 then
        f.read, f.at, f.complete, f.seen = { tail }, 1, true, nil
        compete(f)
    elseif f.complete then
        f.read[#f.read + 1] = tail
    end
end

-- A ticket told again, with the arrival number it had if the node knows it.
local function enqueue_again(ticket, flow, ask, arrival)
    local key = me .. ticket
    local permit = find_permit(key)
    if permit then
        local units, counted = unpack_from('>I4c16', permit, 25)
        return tell(me, ticket, units, counted ~= NO_FLOW)
    end
    local packed = call('HGET', TICKETS, key)
    if packed then
        places[#places + 1] = ticket .. sub(packed, 17, 24)
        return
    end
    if arrival == '\0\0\0\0\0\0\0\0' then
        arrival = arrive()
    else
        st.arrivals = max(st.arrivals, (unpack_from('>I8', arrival)))
    end
    local f = read_flow(flow)
    call('ZADD', LINES, 0, flow .. arrival .. ask .. key)
    stand_in_line(f, ticket, key, arrival, ask)
    read_anew(f)
    if not f.head then
        compete(f)
    elseif arrival < sub(f.head, 1, 8) then
        local start, rest, weight, level = f.start, f.start_rest, f.start_weight, f.level
        withdraw(f)
        compete(f, start, rest, weight, level)
    end
end

local function hold(ticket, units, flow) -- a permit told again
    local key = me .. ticket
    if not find_permit(key) then
        local packed = call('HGET', TICKETS, key)
        if packed then
            cancel(key, packed)
        end
        local f = flow ~= NO_FLOW and read_flow(flow)
        local granted_before = st.granted
        take_units(f, me, ticket, units)
        st.granted = granted_before
    end
end

local function write_tickets()
    if #new_lines > 0 then
        call_many('ZADD', LINES, new_lines)
        new_lines = {}
    end
    if #new_tickets > 0 then
        call_many('HSET', TICKETS, new_tickets)
        new_tickets = {}
    end
end

local function dispatch()
    while granted < grants_left do
        local f = first_head()
        if not f then
            return false
        end
        local tail = f.head
        local node, ticket = sub(tail, 16, 31), sub(tail, 32)
        local units = clamp(f.cost)
        if not is_live(node) then
            leave_line(f, tail)
            granted = granted + 1
        elseif st.too_wide == 1 and f.cost > widest() then
            leave_line(f, tail)
            tell(node, ticket, 0)
            granted = granted + 1
        elseif st.in_flight + units > open then
            return false
        elseif f.running + units > st.flow_cap then
            withdraw(f)
            read_anew(f)
            compete(f)
        else
            local score, level, weight, tag, tag_rest = f.score, f.level, f.weight, f.tag, f.tag_rest
            withdraw(f)
            reached[level] = reached[level] and max(reached[level], score) or score
            take_from_line(f, tail)
            tell(node, ticket, units, take_units(f, node, ticket, units))
            compete(f, tag, tag_rest, weight, level)
            granted = granted + 1
        end
    end
    return first_head() ~= nil and st.in_flight < open
end
