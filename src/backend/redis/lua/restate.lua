-- What a restate, an operator and a loss of data need, and what becomes of pushes.

groups[#groups + 1] = function()
    function q.new_state()
        call('UNLINK', unpack(KEYS))
        for i = 1, #NUMBERS do
            st[NUMBERS[i]] = 0
        end
        st.epoch = sub(redis.sha1hex(me .. q.text(number) .. q.text(now)), 1, 16)
        st.now, st.settle, st.wait_until, st.recovery = now, SETTLE, lease, 1
        reached, competing = {}, { 0, 0, 0, 0, 0, 0, 0, 0 }
    end

    function q.recover() -- another life of this state: nothing is granted until its nodes have told what they hold
        st.epoch = sub(redis.sha1hex(me .. q.text(number) .. q.text(now)), 1, 16)
        st.recovery, st.settle, st.wait_until, st.opened = st.recovery + 1, st.clock + SETTLE, st.clock + lease, 0
        if st.expected > 0 then
            call('DEL', EXPECTED)
            st.expected = 0
        end
    end

    function q.expect(nodes)
        if #nodes > 0 then
            st.expected = st.expected + call('SADD', EXPECTED, unpack(nodes))
            st.membership = st.membership + 1
        end
    end

    function q.set_rules(blob, fresh, by_operator)
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
        q.count_capacity()
    end

    function q.list_permits() -- what Redis thinks the node holds; the node knows better
        local from, listing = list_from, false
        local members = call('ZRANGEBYLEX', PERMITS, '[' .. me .. from, '(' .. me .. '\255', 'LIMIT', 0, TELL)
        for _, member in ipairs(members) do
            local units, flow = unpack_from('>I4c16', member, 25)
            q.tell(me, sub(member, 17, 24), units, flow ~= NO_FLOW)
        end
        if #members == TELL then
            -- The next ticket number: nothing is skipped, and one permit at most is told twice.
            return sub(members[TELL], 17, 24)
        end
    end

    function q.hold(ticket, units, flow) -- a permit told again
        local key = me .. ticket
        if not q.find_permit(key) then
            local packed = call('HGET', TICKETS, key)
            if packed then
                q.cancel(key, packed)
            end
            local f = flow ~= NO_FLOW and q.read_flow(flow)
            local granted_before = st.granted
            q.take_units(f, me, ticket, units)
            st.granted = granted_before
        end
    end

    -- A ticket told again, with the arrival number it had if the node knows it.
    function q.enqueue_again(ticket, flow, ask, arrival)
        local key = me .. ticket
        local permit = q.find_permit(key)
        if permit then
            local units, counted = unpack_from('>I4c16', permit, 25)
            return q.tell(me, ticket, units, counted ~= NO_FLOW)
        end
        local packed = call('HGET', TICKETS, key)
        if packed then
            places[#places + 1] = ticket .. sub(packed, 17, 24)
            return
        end
        if arrival == '\0\0\0\0\0\0\0\0' then
            arrival = q.arrive()
        else
            st.arrivals = max(st.arrivals, (unpack_from('>I8', arrival)))
        end
        local f = q.read_flow(flow)
        call('ZADD', LINES, 0, flow .. arrival .. ask .. key)
        q.stand_in_line(f, ticket, key, arrival, ask)
        q.read_anew(f)
        if not f.head then
            q.compete(f)
        elseif arrival < sub(f.head, 1, 8) then
            local start, rest, weight, level = f.start, f.start_rest, f.start_weight, f.level
            q.withdraw(f)
            q.compete(f, start, rest, weight, level)
        end
    end

    function q.tell_again(entry) -- what pushes may have lost
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

    function q.pass_on() -- grants of other nodes
        local records, sent = {}, false
        for node, list in pairs(pushes) do
            local entry = q.read_node(node)
            local first = entry.pushed + 1
            for i, record in ipairs(list) do
                records[#records + 1] = 0
                records[#records + 1] = node .. pack('>I8', entry.pushed + i) .. record
            end
            entry.pushed = entry.pushed + #list
            q.write_node(node)
            local channel = ARGV[8] .. string.gsub(node, '.', function(c)
                return string.format('%02x', byte(c))
            end)
            q.publish(channel, st.epoch .. pack('>I8I8', entry.session, first) .. concat(list))
        end
        if #records > 0 then
            st.outbox = st.outbox + #records / 2
            q.call_many('ZADD', OUTBOX, records)
        end
    end

    function q.peers()
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

    -- Moves all virtual times back by the same amount. It reads every flow; a queue whose requests cost 1 comes here once in years.
    function q.rebase(by)
        for level = 1, 8 do
            reached[level] = reached[level] and reached[level] - by
        end
        local heads, stored = call('ZRANGE', HEADS, 0, -1, 'WITHSCORES'), call('HGETALL', FLOWS)
        for i = 1, #heads, 2 do
            heads[i], heads[i + 1] = q.text(tonumber(heads[i + 1]) - by), heads[i]
        end
        for i = 2, #stored, 2 do
            local has_head, running, start, rest, weight, score, tag, tag_rest, head = unpack_from(FLOW, stored[i])
            stored[i] = pack(FLOW, has_head, running, start - by, rest, weight, score - by, tag - by, tag_rest, head)
        end
        q.call_many('ZADD', HEADS, heads)
        q.call_many('HSET', FLOWS, stored)
    end
end
