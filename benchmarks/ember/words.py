"""The word lists that the corpus is composed of. Ours, written by hand; no list here is a copy of another's."""

# fmt: off  # lists of phrases read better unbroken

from typing import Final

COMMON: Final = """
a about above across act add after again against age ago agree air all allow almost alone along already also although always among amount
an and animal another answer any anyone anything appear apple apply area arm around arrive art as ask at away baby back bad bag ball bank
bar base basic be bear beat beautiful because become bed before begin behind believe below beside best better between beyond big bill bird
bit black blood blow blue board boat body bone book born both bottle bottom bowl box boy branch bread break bridge bright bring broad brother
brown build burn bus business busy but buy by cake call can capital car card care carry case cat catch cause center central century certain
chain chair chance change character charge cheap check child children choose church circle city claim class clean clear climb clock close
cloth cloud coast coat coffee cold collect color come common company compare complete computer condition consider contain continue control
cook cool copy corn corner correct cost could count country couple course cover create cross crowd cry culture cup current customer cut daily
dance danger dark data daughter day dead deal dear decide deep degree deliver depend describe desert design desk detail develop did die
difference different difficult dinner direct discover discuss distance divide do doctor does dog dollar done door double doubt down draw dream
dress drink drive drop dry during dust each ear early earn earth east easy eat edge education effect egg eight either electric else empty end
enemy energy engine enjoy enough enter entire entrance equal especially even evening event ever every everyone everything exact example except
excite exercise expect experience explain eye face fact fair fall family famous far farm fast father favor fear feed feel feet few field fight
figure fill final find fine finger finish fire first fish fit five flat floor flow flower fly follow food foot for force foreign forest forget
form forward found four free fresh friend from front fruit full fun future game garden gas gather gave general gentle get gift girl give glad
glass go goal gold gone good government grand grass great green grew ground group grow guard guess guest guide had hair half hall hand happen
happy hard has hat have he head health hear heart heat heavy held hello help her here hers high hill him his history hit hold hole home hope
horse hospital hot hotel hour house how however huge human hundred hungry hurry hurt husband ice idea if imagine important in inch include
increase indeed industry inside instead interest into iron is island issue it item its job join joy jump just keep kept key kill kind king
kitchen knee knew know lack lady lake land language large last late laugh law lay lead leaf learn least leather leave left leg length less
lesson let letter level library lie life lift light like likely limit line list listen little live local long look lose loss lost lot loud
love low lunch machine made mail main make man manage many map mark market marry mass master match material matter may maybe me meal mean
measure meat medicine meet meeting member memory men message metal method middle might mile milk million mind minute miss mistake mix modern
moment money month moon more morning most mother motion mountain mouth move much museum music must my name narrow nation natural nature near
necessary neck need neighbor neither never new news next nice night nine no noise none noon nor north nose not note nothing notice now number
object ocean of off offer office often oil old on once one only open operate opinion or orange order other our out outside over own page pain
paint pair paper parent park part party pass past path patient pattern pay peace people per perfect perhaps period person phone photo picture
piece place plain plan plane plant plate play please plenty pocket point police poor popular position possible pound power practice prepare
present press pretty price print private prize probably problem process produce product program promise proper protect proud provide public
pull purpose push put quality quarter queen question quick quiet quite race radio rain raise range rate rather reach read ready real reason
receive recent record red regular relax remain remember repair repeat reply report require rest result return rich ride right ring rise
river road rock roll roof room root rope round row rule run safe said sail salt same sand save saw say scale school science sea search season
seat second secret section see seed seem self sell send sense sentence separate serious serve service set seven several shade shadow shake
shall shape share sharp she sheet shelf shine ship shirt shoe shop shore short should shoulder shout show shut sick side sign silent silver
similar simple since sing single sister sit six size skill skin sky sleep slip slow small smell smile smoke smooth snow so soap social soft
soil soldier some someone something sometimes son song soon sorry sort sound soup south space speak special speech speed spell spend spoke
spot spread spring square stage stair stand star start state station stay steam steel step stick still stone stop store storm story straight
strange street stretch strong student study subject success such sudden sugar suggest suit summer sun supply support sure surface surprise
sweet swim system table tail take talk tall taste teach team tell ten term test than thank that the their them then there these they thick
thin thing think third this those though thought thousand three through throw thus ticket tie time tiny tire to today together told tomorrow
tone tonight too took tool top total touch toward town trade train travel tree trip trouble true trust truth try turn twelve twenty two type
under understand unit until up upon us use usual valley value various very view village visit voice wait walk wall want war warm was wash
watch water wave way we wear weather week weight welcome well went were west what wheel when where whether which while white who whole whose
why wide wife wild will win wind window wine winter wish with within without woman wonder wood word work world worry would write wrong yard
year yellow yes yesterday yet you young your zero
account address allowed answers arrival assistant available balance bathroom battery birthday booking breakfast budget building button cable
calendar camera cancel capacity category chef clinic club college comment contact contract cost coupon credit currency database deadline
default delivery deposit desk destination device director discount download driver elevator email employee entry error evidence exchange
exhibition exit expiry extension factory fee feature file flight folder format founder fridge gallery garage gate guarantee gym headquarters
holiday hours identifier image index ingredient insurance internet inventory invoice journey keyboard label laptop latest laundry lease
license lobby location locker login logo lounge luggage maintenance manager manual maximum membership menu minimum minutes mobile model
monitor monthly motor network newsletter notebook opening option organization owner package parcel parking partner passenger password payment
percent permit pet platform policy pool port postal printer priority profile project purchase rating reader reception receipt recipe refund
region register registration rental reservation reset restaurant reward router salary sample schedule scooter screen seats section security
seller server session shipping shuttle signal software staff stock storage student subscription suite supplier support surface survey tariff
taxi team technician telephone temperature terminal terrace theater timer title toilet tour traffic transfer treatment tutor umbrella update
upload user vacation vehicle vendor version video visitor voucher warehouse warranty website weekend weekly wireless workshop yearly
""".split()

ADJECTIVES: Final = """
amber ancient autumn black blue bold brave brass bright bronze busy calm cedar central clever cobalt copper coral cosy crimson crystal daily
dark double dusty early eastern elder emerald empty evening express extra fast final first floral fresh frozen gentle giant glass golden grand
green grey happy hidden high hollow humble indoor inner iron ivory jade junior large late lazy left light little lively local long lower lucky
main maple marble mellow merry middle midnight misty modern monthly mossy narrow noble north northern old olive open orange outdoor outer oval
pale paper patient pearl plain polar proud purple quick quiet rapid red regular right river rose round royal ruby rustic sandy scarlet second
secret senior sharp short silent silver simple single slow small smart smooth snowy soft solar solid south southern special spring square
standard steady stone summer sunny sweet swift tall tender thin third tidy tiny top twin upper velvet violet vivid warm weekly west western
white wide wild winter wise wooden yearly yellow young
""".split()

THINGS: Final = """
anchor apron atlas axle backpack badge ball banner barrel basket battery beacon bell belt bench bicycle blanket boiler bolt bookcase boot
bottle bowl box bracelet brick broom brush bucket buckle bulb button cabinet cable camera candle canoe canvas cape card carpet cart carton chain
chair charger chest chisel clamp clock cloak coat coil compass cooler crane crate cup curtain cushion desk dial dish drawer drill drum easel
engine fan faucet feather filter flag flask flute folder fork fountain frame funnel gate gauge gear glider globe glove guitar hammer hammock
handle harness harp hat heater helmet hinge hook hose jacket jar jug kayak keyboard kettle key kite knife ladder lamp lantern laptop lens lever
locker loom magnet mallet map mask mat mattress mirror mixer monitor mop mortar motor mug napkin needle net notebook oar oven paddle pail pan
parasol pedal pen pencil piano pillow pin pipe pitcher plate plow pocket pole pot press printer projector pulley pump purse quilt racket
radio raft rail rake ramp razor reel ribbon ring robe rocket rod roller rope router rug ruler sack saddle sail sandal saw scale scarf
scooter screen screw sensor shawl shelf shield shoe shovel skate sled sleeve slipper sock sofa spade speaker spoon spring stamp stand stapler
statue stool stove strap string suitcase switch table tablet tank tent thermometer tile tire toaster torch towel tower toy tractor tray tripod
trolley trophy trumpet trunk tube turbine umbrella valve vase vest violin wagon wallet washer watch wheel whistle wrench zipper
""".split()

FOODS: Final = """
almond cake;apple pie;apple tart;bagel;baguette;banana bread;barley soup;bean stew;beef roll;berry muffin;black tea;blueberry scone;brownie;
burger;butter toast;caesar salad;cappuccino;carrot cake;cheese plate;cheese sandwich;cherry pie;chicken curry;chicken soup;chicken wrap;
chocolate cake;cinnamon roll;club sandwich;cold brew;corn chowder;cream soup;croissant;cucumber salad;double espresso;dumplings;egg sandwich;
espresso;falafel plate;fig tart;fish soup;flat white;french fries;fruit bowl;garlic bread;ginger cookie;ginger tea;goat cheese salad;granola;
green curry;green salad;green tea;grilled fish;ham sandwich;herbal tea;honey cake;hot chocolate;house salad;ice cream;iced coffee;iced tea;
lamb stew;latte;lemon cake;lemon tart;lemonade;lentil soup;macchiato;mango juice;maple waffle;mint tea;mocha;mushroom pasta;mushroom soup;
noodle soup;nut bread;oatmeal;olive bread;omelette;onion soup;orange juice;pancakes;peach pie;peanut cookie;pear tart;pesto pasta;pizza;
plum cake;poppy roll;potato salad;pretzel;pumpkin soup;quiche;raspberry tart;rice bowl;rice pudding;rye bread;salmon bowl;seed bread;
soda;sparkling water;spinach pie;still water;strawberry cake;sweet potato;tomato pasta;tomato soup;tuna salad;turkey sandwich;vanilla shake;
vegetable curry;veggie burger;walnut bread;watermelon juice;white coffee;yogurt bowl
""".replace("\n", "").split(";")

PLACES: Final = """
bakery;bookshop;café;restaurant;tea house;pizzeria;hotel;hostel;guest house;campsite;spa;gym;swimming pool;climbing hall;bowling alley;library;
museum;gallery;theater;cinema;concert hall;zoo;aquarium;botanical garden;clinic;dental practice;pharmacy;veterinary clinic;hair salon;barber shop;
flower shop;hardware store;grocery store;bike shop;toy shop;music shop;shoe store;furniture store;print shop;repair shop;car rental;car wash;
garage;ferry line;bus company;train station;airport;harbor;language school;driving school;dance school;music school;kindergarten;university;
coworking space;software company;web shop;bank;insurance office;travel agency;post office;town hall;recycling center;laundry;tailor;winery;
brewery;farm shop;community center;sports club;yacht club;chess club;conference;festival;observatory;data center;delivery service;energy company
""".replace("\n", "").split(";")

PLACE_SUFFIXES: Final = """
House;Garden;Corner;Works;Studio;Point;Market;Hall;Center;Place;Yard;Court;Lodge;Inn;Club;Lab;Labs;Group;Partners;Collective;Union;Society;Depot;
Express;Supply;Systems;Cloud;Soft;Digital;Services;Company;Trust;Station;Terrace;Tower;Harbor;Mill;Barn;Arcade;Exchange
""".replace("\n", "").split(";")

STREETS: Final = (
    "Street;Road;Lane;Avenue;Square;Way;Alley;Drive;Court;Boulevard;Hill;Row;Walk;Quay;Terrace;Place".split(";")
)

JOBS: Final = """
manager;director;owner;founder;head chef;receptionist;head nurse;head of sales;head of support;head librarian;curator;accountant;head gardener;
chief engineer;technical lead;security officer;press officer;event planner;trainer;head coach;doctor on duty;dentist;pharmacist;caretaker;
tour guide;duty manager;night porter;head of research;chairwoman;chairman;treasurer;secretary;data protection officer;product manager;designer;
head teacher;principal;captain;driver;mechanic;head barista;sommelier;pastry chef;housekeeper;lifeguard;bookkeeper;deputy manager;intern
""".replace("\n", "").split(";")

COUNTED: Final = "rooms seats tables floors employees beds books cars bikes desks parking spots halls suites courts lanes boats animals members students teachers doctors trees screens shelves lockers servers printers machines computers branches shops".replace(
    "parking spots", "spots"
).split()
COLORS: Final = "red blue green yellow black white orange purple pink brown grey silver gold beige turquoise navy crimson ivory".split()
MATERIALS: Final = "steel wood oak pine glass cotton wool silk leather paper plastic rubber copper brass clay stone bamboo linen".split()
WEEKDAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS: Final = "January February March April May June July August September October November December".split()

SYLLABLE_STARTS: Final = "b bl br c ch cl cr d dr f fl fr g gl gr h j k kl kr l m n p ph pl pr qu r s sc sh sk sl sm sn sp st t th tr v w y z".split()
SYLLABLE_MIDDLES: Final = "a a a e e e i i i o o o u u ai au ea ee ei ia ie io oa oo ou y".split()
SYLLABLE_ENDS: Final = ["", "", "", "", "", "b", "ck", "d", "f", "g", "k", "l", "ll", "m", "n", "n", "nd", "ng", "nt", "p", "r", "r", "rd", "rn", "s", "ss", "st", "t", "th", "v", "x", "z"]  # fmt: skip

GIVEN_NAMES: Final = """
Ada Adam Aisha Alan Alba Alex Alice Amir Amy Ana Andre Anna Anton Aria Arthur Ben Bianca Boris Bruno Carla Carlos Cem Chloe Clara Cora Daniel
David Diana Diego Dora Edgar Elena Eli Elif Ella Emil Emma Eric Eva Fatima Felix Finn Fiona Frank Freya George Grace Greta Hana Hannah Hans Harry
Hugo Ian Ida Igor Ines Iris Ivan Jack Jada James Jan Jane Jin Joan Joel John Jonas Julia Kai Karim Kate Kenji Kira Lara Laura Lea Lena Leo Liam
Lily Lina Lisa Luca Lucy Luis Maia Marco Maria Mark Marta Mary Max Maya Mia Milo Mira Nadia Nina Noah Nora Olga Oliver Omar Oscar Paul Pavel
Petra Priya Rana Ravi Rita Robert Rosa Ruth Sam Sara Simon Sofia Stella Sven Tara Theo Thomas Tim Tina Tom Uma Vera Victor Wei Yara Yuki Zoe
""".split()

DOMAINS: Final = "com org net io example shop info dev app co".split()
