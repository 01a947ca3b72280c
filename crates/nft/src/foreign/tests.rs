use super::*;
use crate::Hook::{Forward, Input};

fn chain_of(family: Family, table: &str, name: &str, hook: Hook, drops: bool) -> Chain {
    Chain { family, table: table.into(), name: name.into(), hook: Some(hook), policy_drops: drops }
}

fn pods() -> Vec<IpNet> {
    ["10.42.0.0/16", "fd42::/56"].map(|net| net.parse().unwrap()).into()
}

fn source(address: &[u8], mask: &[u8]) -> Expression {
    let offset = if address.len() == 4 { 12 } else { 8 };
    Expression::NetworkHeader { offset, mask: mask.into(), value: address.into() }
}

#[track_caller]
fn check(chain: &Chain, rules: &[Vec<Expression>], has_chain: bool, expected: &str) {
    let rules_with_handles =
        rules.iter().zip(1..).map(|(parts, handle)| Rule { handle, expressions: parts.clone() });
    let step = match plan_chain(chain, &rules_with_handles.collect::<Vec<_>>(), has_chain, &pods()) {
        ChainAction::Nothing => "nothing".to_owned(),
        ChainAction::Accept { has_jump } => format!("accept, has jump: {has_jump}"),
        ChainAction::Report(obstacle) => obstacle.to_string(),
    };
    assert_eq!(step, expected);
}

#[test]
fn accepts_pods_in_chains_of_iptables_and_firewalld_that_may_drop() {
    let jump = |chain: &str| vec![Expression::NonTerminal, Expression::Verdict(Verdict::Jump(chain.into()))];
    let forward = chain_of(Family::Ip, "filter", "FORWARD", Forward, true);
    check(&forward, &[], false, "accept, has jump: false");
    check(&forward, &[jump("DOCKER-USER")], false, "accept, has jump: false");
    check(&forward, &[jump("SKIFF-FORWARD")], false, "accept, has jump: true");
    check(&forward, &[jump("DOCKER-USER"), jump("SKIFF-FORWARD")], true, "nothing");
    check(&forward, &[jump("DOCKER-USER")], true, "accept, has jump: false");
    let open = Chain { policy_drops: false, ..forward.clone() };
    check(&open, &[], false, "nothing");
    check(&open, &[jump("DOCKER-USER")], false, "accept, has jump: false");
    let firewalld = chain_of(Family::Inet, "firewalld", "filter_INPUT", Input, false);
    check(&firewalld, &[vec![Expression::Reject]], false, "accept, has jump: false");
    check(&firewalld, &[jump("SKIFF-INPUT"), vec![Expression::Reject]], true, "nothing");
}

#[test]
fn reports_chains_of_others_that_drop() {
    let chain = chain_of(Family::Inet, "admin", "forward", Forward, true);
    let policy = "table inet admin, chain forward: the policy drops packets of pods";
    check(&chain, &[], false, policy);
    check(&chain, &[vec![Expression::OtherMatch, Expression::Verdict(Verdict::Accept)]], false, policy);
    let (v4, v6) = (source(&[10, 42, 0, 0], &[255, 255, 0, 0]), source(&[0xfd, 0x42], &[255, 255]));
    let accept =
        |part: &Expression| vec![part.clone(), Expression::NonTerminal, Expression::Verdict(Verdict::Accept)];
    check(&chain, &[accept(&v4)], false, policy);
    check(&chain, &[accept(&v4), accept(&v6)], false, "nothing");
    let in_inet = [vec![Expression::Family(IpFamily::V4)], accept(&v4)].concat();
    check(&chain, &[in_inet, accept(&v6)], false, "nothing");
    check(
        &chain,
        &[vec![Expression::Family(IpFamily::V4), Expression::Verdict(Verdict::Accept)]],
        false,
        policy,
    );
    let subnet = source(&[10, 42, 1, 0], &[255, 255, 255, 0]);
    check(&chain, &[accept(&subnet), accept(&v6)], false, policy);
    let open = Chain { policy_drops: false, ..chain };
    check(&open, &[], false, "nothing");
    check(&open, &[vec![Expression::OtherMatch, Expression::Reject]], false, "nothing");
    let rule = "table inet admin, chain forward: the rule with handle 2 drops packets of pods";
    check(&open, &[accept(&v4), vec![Expression::NonTerminal, Expression::Reject], accept(&v6)], false, rule);
    check(&open, &[accept(&v4), accept(&v6), vec![Expression::Verdict(Verdict::Drop)]], false, "nothing");
    // A table of one family does not need rules for the other.
    let v4_only = chain_of(Family::Ip, "admin", "input", Input, true);
    check(&v4_only, &[accept(&v4)], false, "nothing");
}

#[test]
fn matches_only_input_and_forward_filter_chains() {
    let chain = chain_of(Family::Inet, "skiff", "filter-forward", Forward, false);
    assert!(!chain.is_filter("skiff"));
    assert!(Chain { family: Family::Ip, ..chain.clone() }.is_filter("skiff"));
    assert!(!Chain { hook: None, table: "x".into(), ..chain.clone() }.is_filter("skiff"));
    assert!(!Chain { hook: Some(Hook::Output), table: "x".into(), ..chain }.is_filter("skiff"));
}
