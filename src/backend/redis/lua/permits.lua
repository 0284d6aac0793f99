-- Permits: units that are granted, and who is told.
--
-- PERMITS  members node ticket units flow, all scores 0; the flow is 0 where its units are not counted
-- OUTBOX   members node sequence ticket units counted: grants told by a push and not acknowledged yet

local NO_BOUND = 2 ^ 53
local open = -1 -- the units that may be in flight now; less than the capacity while recovering
local granted, grants, refusals, places, pushes = 0, {}, {}, {}, {}
local new_permits, new_lines, new_tickets = {}, {}, {}
local flows, flows_touched, gone_tickets = {}, {}, {} -- as read, those that change, and tickets that have left

function q.widest()
    return min(st.capacity, st.flow_cap)
end

function q.clamp(cost)
    return min(cost, q.widest())
end

function q.tell(node, ticket, units, counted)
    local record = ticket .. q.units_of(units) .. (counted and '\1' or '\0')
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

function q.take_units(f, node, ticket, units)
    local counted = f and st.flow_cap < NO_BOUND
    st.in_flight, st.permits, st.granted = st.in_flight + units, st.permits + 1, st.granted + units
    if counted then
        f.running = f.running + units
        flows_touched[f.id] = f
    end
    local n = #new_permits
    new_permits[n + 1], new_permits[n + 2] = 0, node .. ticket .. q.units_of(units) .. (counted and f.id or NO_FLOW)
    return counted
end

function q.give_units(member) -- a permit's member, which was in PERMITS
    local units, flow = unpack_from('>I4c16', member, 25)
    st.in_flight, st.permits = st.in_flight - units, st.permits - 1
    if flow ~= NO_FLOW then
        local f = q.read_flow(flow)
        f.running = max(0, f.running - units)
        flows_touched[flow] = f
        if not f.head then
            q.compete(f)
        end
    end
end

function q.write_permits()
    if #new_permits > 0 then
        q.call_many('ZADD', PERMITS, new_permits)
        new_permits = {}
    end
end

-- Ends of permits, each told with its units, so that one command finds them all.
function q.release_all(blob)
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
            q.give_units(found[i])
        end
    end
    if #others > 0 then
        q.finish_all(others)
    end
end

function q.arrive()
    st.arrivals = max(st.arrivals + 1, now) -- after a loss, new tickets stand behind those that are restated
    return pack('>I8', st.arrivals)
end

function q.refuse(ticket, cause)
    refusals[#refusals + 1] = ticket .. pack('>B', cause)
end

function q.enqueue(ticket, flow, ask, waits)
    local cost = unpack_from('>I4', ask)
    if st.too_wide == 1 and cost > q.widest() then
        return q.refuse(ticket, TOO_WIDE)
    end
    local counts, f = st.flow_cap < NO_BOUND, nil
    if st.heads == 0 then
        local units = q.clamp(cost)
        if st.in_flight + units <= open then
            f = counts and q.read_flow(flow)
            if not counts or (f.running + units <= st.flow_cap and not q.has_line(f)) then
                q.arrive()
                granted = granted + 1
                return q.tell(me, ticket, units, q.take_units(f, me, ticket, units))
            end
        end
    end
    if not waits then
        return q.refuse(ticket, WOULD_WAIT)
    end
    if st.waiting >= st.max_waiting then
        return q.refuse(ticket, QUEUE_FULL)
    end
    f = q.look_at_flow(flow)
    if st.max_per_flow < NO_BOUND and q.line_length(f) >= st.max_per_flow then
        return q.refuse(ticket, FLOW_FULL)
    end
    q.join_line(f, ticket, ask)
end
